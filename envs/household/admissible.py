"""Which commands are admissible: exactly those that `World.step` answers."""

from __future__ import annotations

from .situation import TREATMENT_OF, Situation
from .state import NOTHING
from .syntax import PutSyntax
from .vocabulary import TOGGLEABLE


def admissible_commands(situation: Situation, put_syntax: PutSyntax) -> list[str]:
    """Every admissible command, sorted."""
    house, state = situation.house, situation.state
    commands = ["help", "inventory", "look"]
    commands += [
        f"go to {name}" for name, pose in zip(house.receptacles, house.poses, strict=True) if pose != state.pose
    ]
    for receptacle in _here(situation):
        name = house.receptacles[receptacle]
        commands.append(f"examine {name}")
        if situation.is_openable(receptacle):
            commands.append(f"{'close' if state.opened[receptacle] else 'open'} {name}")
    near = [thing for thing in range(len(house.objects)) if situation.is_near(thing)]
    commands += [f"use {house.objects[thing]}" for thing in near if house.object_types[thing] in TOGGLEABLE]
    if state.held == NOTHING:
        commands += _takes(situation, near)
    else:
        commands += _with_held(situation, near, put_syntax)
    return sorted(commands)


def _here(situation: Situation) -> list[int]:
    return situation.at_pose.get(situation.state.pose, [])


def _takes(situation: Situation, near: list[int]) -> list[str]:
    house, places = situation.house, situation.state.places
    return [
        f"take {house.objects[thing]} from {house.receptacles[places[thing]]}"
        for thing in near
        if situation.can_take(thing, places[thing])
    ]


def _with_held(situation: Situation, near: list[int], put_syntax: PutSyntax) -> list[str]:
    house = situation.house
    held = house.objects[situation.state.held]
    commands = [f"examine {held}"]
    for receptacle in _here(situation):
        name = house.receptacles[receptacle]
        commands += [f"{verb} {held} with {name}" for verb in TREATMENT_OF if situation.can_treat(verb, receptacle)]
        if situation.can_put(receptacle):
            commands.append(f"{put_syntax} {held}{put_syntax.separator}{name}")
    commands += [f"slice {house.objects[thing]} with {held}" for thing in near if situation.can_slice(thing)]
    return commands
