"""A house and its changing state, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from .goals import Goal, TaskType

START = -1
"""The agent's pose before it goes anywhere: the middle of the room."""
HELD = -1
"""The place of the object in the agent's hand."""
NOTHING = -1
"""What an empty hand holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What does not change in an episode. Receptacles and objects are in the order in which lists show them."""

    scene: int
    receptacles: tuple[str, ...]
    """Names: type and number."""
    receptacle_types: tuple[str, ...]
    poses: tuple[int, ...]
    """Where one stands to reach each receptacle; several may share a pose."""
    objects: tuple[str, ...]
    object_types: tuple[str, ...]
    places: tuple[int, ...]
    """Index of the receptacle in which each object lies at first."""
    goal: Goal

    def to_plain(self) -> dict[str, Any]:
        """This house as JSON types; `from_plain` restores it."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        lists = {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
        return {**lists, "goal": asdict(self.goal)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> House:
        """Restore a house from `to_plain`."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
        goal = dict(values.pop("goal"))
        return cls(**values, goal=Goal(TaskType(goal.pop("task_type")), **goal))


@dataclass(slots=True)
class State:
    """What an episode changes."""

    pose: int
    held: int
    """Index of the object in the hand, or `NOTHING`."""
    places: list[int]
    """Receptacle of each object, or `HELD`."""
    opened: list[bool]
    """Of each receptacle."""
    conditions: list[int]
    """`Condition` flags of each object."""

    @classmethod
    def initial(cls, house: House) -> State:
        """The state at the start of an episode: everything closed, hand empty."""
        return cls(START, NOTHING, list(house.places), [False] * len(house.receptacles), [0] * len(house.objects))

    def to_plain(self) -> dict[str, Any]:
        """This state as JSON types; `from_plain` restores it."""
        return {
            "pose": self.pose,
            "held": self.held,
            "places": list(self.places),
            "opened": list(self.opened),
            "conditions": list(self.conditions),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> State:
        """Restore a state from `to_plain`; shares nothing with `plain`."""
        values: dict[str, Any] = {name: list(v) if isinstance(v, list) else v for name, v in plain.items()}
        return cls(**values)


def number_names(types: Sequence[str]) -> tuple[str, ...]:
    """Names for things sorted by type: numbers count down to 1 within a type, as ALFWorld lists them.

    >>> number_names(["drawer", "drawer", "fridge"])
    ('drawer 2', 'drawer 1', 'fridge 1')
    """
    left = {kind: types.count(kind) for kind in set(types)}
    names = []
    for kind in types:
        names.append(f"{kind} {left[kind]}")
        left[kind] -= 1
    return tuple(names)
