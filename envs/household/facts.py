"""What is the case in a house at first, beyond its furniture and its things: the vocabulary's facts, or a game file's.

A generated house follows the vocabulary. A game of the original states every fact itself, and some of them are odd: a
thing that lies in two receptacles, a thing that is noted elsewhere than where it lies, a pen in a mug, an open drawer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

START = -1
"""The agent's pose before it goes anywhere: the middle of the room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts by receptacle or by thing, in the order of the house's lists. Poses are those of the house."""

    accepts: Mapping[str, frozenset[str]]
    """Type of receptacle to the types of things that can be put there."""
    openable: tuple[bool, ...]
    opened: tuple[bool, ...]
    abilities: tuple[int, ...]
    """`Ability` flags of each thing."""
    places: tuple[tuple[int, ...], ...]
    """The receptacles in which each thing lies."""
    spots: tuple[tuple[int, ...], ...]
    """The poses at which each thing is noted: where a knife reaches it."""
    insides: tuple[tuple[int, ...], ...]
    """The things in each thing."""
    conditions: tuple[int, ...]
    """`Condition` flags of each thing."""
    start: int = START
    """Where the agent stands."""
    goal_text: str
    """The goal as the game words it."""

    def to_plain(self) -> dict[str, Any]:
        """These facts as JSON types; `from_plain` restores them."""
        plain: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, "accepts": {kind: sorted(accepted) for kind, accepted in self.accepts.items()}}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Facts:
        """Restore facts from `to_plain`."""
        values = {name: _frozen(value) for name, value in plain.items()}
        return cls(**values | {"accepts": {kind: frozenset(names) for kind, names in plain["accepts"].items()}})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
