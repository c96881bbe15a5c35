"""A house and its changing state, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from .facts import Facts
from .goals import Goal, TaskType
from .vocabulary import CONTENTS, OPENABLE, abilities_of

NOTHING = -1
"""Index of the held object if the hand is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """Constant part of an episode. Receptacles and objects are in the order in which lists show them."""

    scene: int
    receptacles: tuple[str, ...]
    """Names, of type and number."""
    receptacle_types: tuple[str, ...]
    poses: tuple[int, ...]
    """Pose from which each receptacle is reached; several may share a pose."""
    objects: tuple[str, ...]
    object_types: tuple[str, ...]
    places: tuple[int, ...]
    """Index of the receptacle in which each object lies at first; empty if `stated` contains it."""
    goal: Goal
    stated: Facts | None = None
    """Facts of a game file; ``None`` for those of the vocabulary."""

    def facts(self) -> Facts:
        """Return the initial facts."""
        return vocabulary_facts(self) if self.stated is None else self.stated

    def to_plain(self) -> dict[str, Any]:
        """Return this house as JSON types; `from_plain` restores it."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
        del lists["stated"]
        stated = {} if self.stated is None else {"stated": self.stated.to_plain()}
        return {**lists, **stated, "goal": asdict(self.goal)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> House:
        """Restore a house from `to_plain`."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
        goal = dict(values.pop("goal"))
        stated = Facts.from_plain(values.pop("stated")) if "stated" in values else None
        return cls(**values, stated=stated, goal=Goal(TaskType(goal.pop("task_type")), **goal))


def vocabulary_facts(house: House) -> Facts:
    """Return the facts of a house that follows the vocabulary: all closed and untouched, each thing in one place."""
    return Facts(
        accepts=CONTENTS,
        openable=tuple(kind in OPENABLE for kind in house.receptacle_types),
        opened=(False,) * len(house.receptacles),
        abilities=tuple(map(abilities_of, house.object_types)),
        places=tuple((place,) for place in house.places),
        spots=tuple((house.poses[place],) for place in house.places),
        insides=((),) * len(house.objects),
        conditions=(0,) * len(house.objects),
        goal_text=house.goal.text,
    )


@dataclass(slots=True)
class State:
    """Changing part of an episode."""

    pose: int
    held: int
    """Index of the object in the hand, or `NOTHING`."""
    places: list[tuple[int, ...]]
    """Receptacles in which each object lies; usually none for the held one."""
    spots: list[tuple[int, ...]]
    """Poses from which a knife reaches each object."""
    left: list[tuple[int, ...]]
    """Receptacles from which each object was taken, if another one shares the pose; `look` uses them."""
    opened: list[bool]
    """True for each open receptacle."""
    conditions: list[int]
    """`Condition` flags of each object."""

    @classmethod
    def initial(cls, facts: Facts) -> State:
        """Return the state at the start of an episode; the hand is empty."""
        left: list[tuple[int, ...]] = [()] * len(facts.places)
        at_first = (list(facts.places), list(facts.spots), left, list(facts.opened), list(facts.conditions))
        return cls(facts.start, NOTHING, *at_first)

    def to_plain(self) -> dict[str, Any]:
        """Return this state as JSON types; `from_plain` restores it."""
        return {
            "pose": self.pose,
            "held": self.held,
            "places": list(self.places),
            "spots": list(self.spots),
            "left": list(self.left),
            "opened": list(self.opened),
            "conditions": list(self.conditions),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> State:
        """Restore a state from `to_plain`; shares nothing with `plain`."""
        values: dict[str, Any] = {name: list(v) if isinstance(v, list) else v for name, v in plain.items()}
        for name in ("places", "spots", "left"):
            values[name] = [tuple(numbers) for numbers in plain[name]]
        return cls(**values)


def number_names(types: Sequence[str]) -> tuple[str, ...]:
    """Return names for things sorted by type; numbers count down to 1 within a type, as in ALFWorld.

    >>> number_names(["drawer", "drawer", "fridge"])
    ('drawer 2', 'drawer 1', 'fridge 1')
    """
    left = {kind: types.count(kind) for kind in set(types)}
    names = []
    for kind in types:
        names.append(f"{kind} {left[kind]}")
        left[kind] -= 1
    return tuple(names)
