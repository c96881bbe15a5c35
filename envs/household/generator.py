"""Generator of houses: a scene's furniture, a reachable goal, and things at random places.

A house is a function of scene, task type, size and seed. Python's Mersenne Twister is used only through `random()`,
whose numbers are the same on every platform and in every version.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from agentrl.errors import UsageError

from .goals import Goal, TaskType
from .scenes import EXTENTS, Size, layout_of
from .state import House, number_names
from .vocabulary import CONTENTS, LAMP, LAMP_STANDS, ROOM_OBJECTS

_MAX_COPIES = 3
"""Maximum number of things of one kind in a house."""
_LAMP_RATE = 0.5
"""Probability that a room that can have a lamp has one although the task needs none."""

T = TypeVar("T")
_Homes = dict[str, tuple[int, ...]]
"""Receptacles by kind of receptacle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnnumberedThing:
    """A thing without a number yet."""

    kind: str
    receptacle: int


def generate(scene: int, task_type: TaskType, seed: int, size: Size) -> House:
    """Return a house in which the task is possible and not yet done.

    Raises:
        UsageError: the room does not allow the task.
    """
    layout = layout_of(scene, size)
    if layout.room not in task_type.rooms:
        raise UsageError(
            f"scene {scene} allows no {task_type} task", got=layout.room, expected=" or ".join(task_type.rooms)
        )
    random = Random(f"house {scene} {task_type} {size} {seed}")
    goal = _draw_goal(scene, task_type, size, random)
    things = _goal_things(scene, goal, size, random)
    things += _other_things(scene, goal, size, len(things), random)
    things = [thing for _, _, thing in sorted((thing.kind, random.random(), thing) for thing in things)]
    return House(
        scene=scene,
        receptacles=layout.names,
        receptacle_types=layout.types,
        poses=layout.poses,
        objects=number_names([thing.kind for thing in things]),
        object_types=tuple(thing.kind for thing in things),
        places=tuple(thing.receptacle for thing in things),
        goal=goal,
    )


def _draw_goal(scene: int, task_type: TaskType, size: Size, random: Random) -> Goal:
    kind, targets = _choose(_goal_choices(scene, task_type, size), random)
    return Goal(task_type, kind, _choose(targets, random), template=int(random.random() * 2))


def _goal_things(scene: int, goal: Goal, size: Size, random: Random) -> list[_UnnumberedThing]:
    """Return the things of the goal's kind, up to `_MAX_COPIES`, enough of them outside its target, and its lamp."""
    homes = _homes(scene, size)[goal.object_type]
    outside = {kind: places for kind, places in homes.items() if kind != goal.target_type}
    count = goal.object_count + int(random.random() * (_MAX_COPIES - goal.object_count + 1))
    spare_homes = homes if goal.task_type.treatment else outside
    things = [_place(goal.object_type, outside if i < goal.object_count else spare_homes, random) for i in range(count)]
    stands = _homes(scene, size)[LAMP]
    if stands and (goal.task_type is TaskType.LOOK or random.random() < _LAMP_RATE):
        things.append(_place(LAMP, stands, random))
    return things


def _other_things(scene: int, goal: Goal, size: Size, taken: int, random: Random) -> list[_UnnumberedThing]:
    low, high = EXTENTS[size].objects
    count = low + int(random.random() * (high - low + 1)) - taken
    homes = _homes(scene, size)
    kinds = [kind for kind in homes if kind not in (LAMP, goal.object_type) and homes[kind]] * _MAX_COPIES
    things = []
    for _ in range(min(count, len(kinds))):
        kind = kinds.pop(int(random.random() * len(kinds)))
        things.append(_place(kind, homes[kind], random))
    return things


def _place(kind: str, homes: _Homes, random: Random) -> _UnnumberedThing:
    """Put a thing at a random place; all kinds of receptacles are equally likely, regardless of their counts."""
    return _UnnumberedThing(kind=kind, receptacle=_choose(homes[_choose(tuple(homes), random)], random))


def _choose(items: Sequence[T], random: Random) -> T:
    return items[int(random.random() * len(items))]


@functools.cache
def _homes(scene: int, size: Size) -> dict[str, _Homes]:
    """Return the possible receptacles of each kind of thing in a scene."""
    layout = layout_of(scene, size)
    by_kind = {kind: tuple(i for i, t in enumerate(layout.types) if t == kind) for kind in layout.types}
    kinds = ROOM_OBJECTS[layout.room][: EXTENTS[size].object_types]
    homes = {kind: {k: places for k, places in by_kind.items() if kind in CONTENTS[k]} for kind in kinds}
    is_lamp_room = layout.room in TaskType.LOOK.rooms
    homes[LAMP] = {k: places for k, places in by_kind.items() if is_lamp_room and k in LAMP_STANDS}
    return homes


@functools.cache
def _goal_choices(scene: int, task_type: TaskType, size: Size) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the possible kinds of things of a goal of this type, each with its possible targets."""
    treatment = task_type.treatment
    choices = []
    for kind, homes in _homes(scene, size).items():
        if kind == LAMP or (treatment and kind not in treatment.objects):
            continue
        targets = tuple(t for t in homes if len(homes) > 1 and not (treatment and t == treatment.appliance))
        if task_type is TaskType.LOOK:
            targets = (LAMP,) if homes else ()
        if targets:
            choices.append((kind, targets))
    return tuple(choices)
