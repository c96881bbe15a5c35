"""The admissible commands: exactly those that `World.step` answers."""

from __future__ import annotations

from .situation import TREATMENT_OF, Situation
from .state import NOTHING
from .syntax import PutSyntax
from .vocabulary import KNIVES


def admissible_commands(situation: Situation, put_syntax: PutSyntax) -> list[str]:
    """Return every admissible command, sorted."""
    house, state = situation.house, situation.state
    commands = ["help", "inventory", "look"]
    commands += [
        f"go to {name}" for name, pose in zip(house.receptacles, house.poses, strict=True) if pose != state.pose
    ]
    for receptacle in situation.here():
        name = house.receptacles[receptacle]
        commands.append(f"examine {name}")
        if situation.facts.openable[receptacle]:
            commands.append(f"{'close' if state.opened[receptacle] else 'open'} {name}")
    commands += [f"use {name}" for thing, name in enumerate(house.objects) if situation.can_use(thing)]
    commands += _takes(situation) if state.held == NOTHING else _with_held(situation, put_syntax)
    return sorted(commands)


def _takes(situation: Situation) -> list[str]:
    house, here = situation.house, situation.here()
    return [
        f"take {house.objects[thing]} from {house.receptacles[place]}"
        for thing, places in enumerate(situation.state.places)
        for place in places
        if place in here and situation.can_take(thing, place)
    ]


def _with_held(situation: Situation, put_syntax: PutSyntax) -> list[str]:
    house = situation.house
    held = house.objects[situation.state.held]
    commands = [f"examine {held}"]
    for receptacle in situation.here():
        name = house.receptacles[receptacle]
        commands += [f"{verb} {held} with {name}" for verb in TREATMENT_OF if situation.can_treat(verb, receptacle)]
        if situation.can_put(receptacle):
            commands.append(f"{put_syntax} {held}{put_syntax.separator}{name}")
    if house.object_types[situation.state.held] in KNIVES:
        commands += [
            f"slice {name} with {held}" for thing, name in enumerate(house.objects) if situation.can_slice(thing)
        ]
    return commands
