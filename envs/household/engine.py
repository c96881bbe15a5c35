"""The rules: what each command does to the state, what it says, and which commands are admissible.

A command is admissible exactly when `World.step` answers it; everything else is answered by ``None``, which the
environment words as "Nothing happens.". Quirks of the original that are kept: going is teleporting; appliances work
closed; a lamp that was used once stays on; slicing reaches into closed receptacles; nothing is ever full.
"""

from __future__ import annotations

import enum
from collections import defaultdict

from .goals import REQUIRED_CONDITION, TREATMENTS, Condition, TaskType
from .state import HELD, NOTHING, START, House, State
from .texts import (
    EMPTY_HANDED,
    MIDDLE_OF_ROOM,
    describe_object,
    enumerate_things,
    facing,
    help_text,
)
from .vocabulary import CONTENTS, KNIVES, OPENABLE, SLICEABLE, TOGGLEABLE

_TREATMENTS = {treatment.verb: treatment for treatment in TREATMENTS.values()}
_EFFECTS = {
    "clean": (Condition.CLEAN.value, 0),
    "heat": (Condition.HOT.value, Condition.COOL.value),
    "cool": (Condition.COOL.value, Condition.HOT.value),
}
"""Verb to the flags that it sets and clears."""


class PutSyntax(enum.StrEnum):
    """How an object is put down; ALFWorld changed its wording in 0.4."""

    MOVE = "move"
    """``move apple 1 to fridge 1``"""
    PUT = "put"
    """``put apple 1 in/on fridge 1``"""

    @property
    def separator(self) -> str:
        """What stands between the object and the receptacle."""
        return " to " if self is PutSyntax.MOVE else " in/on "


class World:
    """A house in some state, and what commands do to it.

    Args:
        house: What does not change.
        state: Where to go on; the initial state when left out.
        put_syntax: How an object is put down.
    """

    def __init__(self, house: House, state: State | None = None, put_syntax: PutSyntax = PutSyntax.MOVE) -> None:
        self.house = house
        self.state = State.initial(house) if state is None else state
        self.put_syntax = put_syntax
        self._separator = put_syntax.separator
        self._receptacles = {name: index for index, name in enumerate(house.receptacles)}
        self._objects = {name: index for index, name in enumerate(house.objects)}
        self._at_pose: defaultdict[int, list[int]] = defaultdict(list)
        for receptacle, pose in enumerate(house.poses):
            self._at_pose[pose].append(receptacle)
        self._commands = {
            "go": self._go,
            "take": self._take,
            put_syntax.value: self._put,
            "open": self._open,
            "close": self._close,
            "examine": self._examine,
            "use": self._use,
            "slice": self._slice,
            "look": self._look,
            "inventory": self._inventory,
            "help": self._help,
        }
        self.solved = self._is_goal_reached()

    def step(self, command: str) -> str | None:
        """Do what `command` says and answer it; ``None`` when it is not admissible, and nothing changed."""
        verb, _, rest = command.strip().partition(" ")
        if verb in _TREATMENTS:
            return self._treat(verb, rest)
        handler = self._commands.get(verb)
        return None if handler is None else handler(rest)

    def _go(self, rest: str) -> str | None:
        to, _, name = rest.partition(" ")
        receptacle = self._receptacles.get(name)
        if to != "to" or receptacle is None or self.house.poses[receptacle] == self.state.pose:
            return None
        self.state.pose = self.house.poses[receptacle]
        self.solved = self._is_goal_reached()
        return f"You arrive at {name}. {self._contents_text(receptacle)}"

    def _open(self, name: str) -> str | None:
        receptacle = self._reachable(name)
        if receptacle is None or not self._is_openable(receptacle) or self.state.opened[receptacle]:
            return None
        self.state.opened[receptacle] = True
        return f"You open the {name}. {self._contents_text(receptacle)}"

    def _close(self, name: str) -> str | None:
        receptacle = self._reachable(name)
        if receptacle is None or not self.state.opened[receptacle]:
            return None
        self.state.opened[receptacle] = False
        return f"You close the {name}."

    def _take(self, rest: str) -> str | None:
        name, _, place = rest.partition(" from ")
        thing, receptacle = self._objects.get(name), self._reachable(place)
        if thing is None or receptacle is None or not self._can_take(thing, receptacle):
            return None
        self.state.places[thing] = HELD
        self.state.held = thing
        self.solved = self._is_goal_reached()
        return f"You pick up the {name} from the {place}."

    def _put(self, rest: str) -> str | None:
        name, _, place = rest.partition(self._separator)
        receptacle = self._reachable(place)
        if receptacle is None or not self._is_held(name) or not self._can_put(receptacle):
            return None
        self.state.places[self.state.held] = receptacle
        self.state.held = NOTHING
        self.solved = self._is_goal_reached()
        if self.put_syntax is PutSyntax.PUT:
            return f"You put the {name} in/on the {place}."
        return f"You move the {name} to the {place}."

    def _treat(self, verb: str, rest: str) -> str | None:
        name, _, place = rest.partition(" with ")
        receptacle = self._reachable(place)
        if receptacle is None or not self._is_held(name) or not self._can_treat(verb, receptacle):
            return None
        sets, clears = _EFFECTS[verb]
        conditions = self.state.conditions
        conditions[self.state.held] = conditions[self.state.held] & ~clears | sets
        self.solved = self._is_goal_reached()
        return f"You {verb} the {name} using the {place}."

    def _use(self, name: str) -> str | None:
        thing = self._objects.get(name)
        if thing is None or self.house.object_types[thing] not in TOGGLEABLE or not self._is_near(thing):
            return None
        self.state.conditions[thing] |= Condition.TOGGLED.value
        self.solved = self._is_goal_reached()
        return f"You turn on the {name}."

    def _slice(self, rest: str) -> str | None:
        name, _, knife = rest.partition(" with ")
        thing = self._objects.get(name)
        if thing is None or not self._is_held(knife) or not self._can_slice(thing):
            return None
        self.state.conditions[thing] |= Condition.SLICED.value
        return f"You sliced the {name} with the {knife}."

    def _examine(self, name: str) -> str | None:
        receptacle = self._reachable(name)
        if receptacle is not None:
            return self._contents_text(receptacle)
        if not self._is_held(name):
            return None
        held = self.state.held
        toggleable = self.house.object_types[held] in TOGGLEABLE
        return describe_object(name, self.state.conditions[held], toggleable=toggleable)

    def _look(self, rest: str) -> str | None:
        if rest:
            return None
        if self.state.pose == START:
            return MIDDLE_OF_ROOM.format("nothing")
        return facing([self.house.receptacles[receptacle] for receptacle in self._at_pose[self.state.pose]])

    def _inventory(self, rest: str) -> str | None:
        if rest:
            return None
        if self.state.held == NOTHING:
            return EMPTY_HANDED
        return f"You are carrying: a {self.house.objects[self.state.held]}."

    def _help(self, rest: str) -> str | None:
        return None if rest else help_text(f"{self.put_syntax} (object){self._separator}(receptacle)")

    def _reachable(self, name: str) -> int | None:
        receptacle = self._receptacles.get(name)
        return receptacle if receptacle is not None and self.house.poses[receptacle] == self.state.pose else None

    def _is_openable(self, receptacle: int) -> bool:
        return self.house.receptacle_types[receptacle] in OPENABLE

    def _is_accessible(self, receptacle: int) -> bool:
        return self.state.opened[receptacle] or not self._is_openable(receptacle)

    def _is_held(self, name: str) -> bool:
        return self.state.held != NOTHING and self.house.objects[self.state.held] == name

    def _is_near(self, thing: int) -> bool:
        place = self.state.places[thing]
        return place != HELD and self.house.poses[place] == self.state.pose

    def _can_take(self, thing: int, receptacle: int) -> bool:
        return (
            self.state.held == NOTHING
            and self.state.places[thing] == receptacle
            and self.house.object_types[thing] not in TOGGLEABLE
            and self._is_accessible(receptacle)
        )

    def _can_put(self, receptacle: int) -> bool:
        accepted = CONTENTS[self.house.receptacle_types[receptacle]]
        return self._is_accessible(receptacle) and self.house.object_types[self.state.held] in accepted

    def _can_treat(self, verb: str, receptacle: int) -> bool:
        treatment = _TREATMENTS[verb]
        at_appliance = self.house.receptacle_types[receptacle] == treatment.appliance
        return at_appliance and self.house.object_types[self.state.held] in treatment.objects

    def _can_slice(self, thing: int) -> bool:
        with_knife = self.house.object_types[self.state.held] in KNIVES
        return with_knife and self.house.object_types[thing] in SLICEABLE and self._is_near(thing)

    def _contents_text(self, receptacle: int) -> str:
        name = self.house.receptacles[receptacle]
        if not self._is_openable(receptacle):
            return f"On the {name}, you see {self._list_contents(receptacle)}."
        if not self.state.opened[receptacle]:
            return f"The {name} is closed."
        return f"The {name} is open. In it, you see {self._list_contents(receptacle)}."

    def _list_contents(self, receptacle: int) -> str:
        objects = self.house.objects
        return enumerate_things([objects[i] for i, place in enumerate(self.state.places) if place == receptacle])

    def _is_goal_reached(self) -> bool:
        if self.house.goal.task_type is TaskType.LOOK:
            return self._is_held_in_light()
        goal, house, state = self.house.goal, self.house, self.state
        required = REQUIRED_CONDITION.get(goal.task_type, 0)
        places = [
            place
            for kind, place, condition in zip(house.object_types, state.places, state.conditions, strict=True)
            if kind == goal.object_type
            and place != HELD
            and condition & required == required
            and house.receptacle_types[place] == goal.target_type
        ]
        return any(places.count(place) >= goal.needed for place in places)

    def _is_held_in_light(self) -> bool:
        goal, house, state = self.house.goal, self.house, self.state
        if state.held == NOTHING or house.object_types[state.held] != goal.object_type:
            return False
        return any(
            kind == goal.target_type and state.conditions[thing] & Condition.TOGGLED and self._is_near(thing)
            for thing, kind in enumerate(house.object_types)
        )

    def admissible(self) -> list[str]:
        """Every command that `step` answers now, sorted."""
        house, state = self.house, self.state
        here = self._at_pose.get(state.pose, [])
        commands = ["help", "inventory", "look"]
        commands += [
            f"go to {name}" for name, pose in zip(house.receptacles, house.poses, strict=True) if pose != state.pose
        ]
        for receptacle in here:
            name = house.receptacles[receptacle]
            commands.append(f"examine {name}")
            if self._is_openable(receptacle):
                commands.append(f"{'close' if state.opened[receptacle] else 'open'} {name}")
        commands += [f"use {house.objects[thing]}" for thing in self._near() if house.object_types[thing] in TOGGLEABLE]
        commands += self._admissible_takes() if state.held == NOTHING else self._admissible_with_held(here)
        return sorted(commands)

    def _near(self) -> list[int]:
        return [thing for thing in range(len(self.house.objects)) if self._is_near(thing)]

    def _admissible_takes(self) -> list[str]:
        house, places = self.house, self.state.places
        return [
            f"take {house.objects[thing]} from {house.receptacles[places[thing]]}"
            for thing in self._near()
            if self._can_take(thing, places[thing])
        ]

    def _admissible_with_held(self, here: list[int]) -> list[str]:
        house = self.house
        held = house.objects[self.state.held]
        commands = [f"examine {held}"]
        for receptacle in here:
            name = house.receptacles[receptacle]
            commands += [f"{verb} {held} with {name}" for verb in _TREATMENTS if self._can_treat(verb, receptacle)]
            if self._can_put(receptacle):
                commands.append(f"{self.put_syntax} {held}{self._separator}{name}")
        commands += [f"slice {house.objects[thing]} with {held}" for thing in self._near() if self._can_slice(thing)]
        return commands
