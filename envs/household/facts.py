"""Initial facts of a house other than its furniture and its things, from the vocabulary or from a game file.

A generated house follows the vocabulary. A game of the original states every fact explicitly, including unusual ones:
a thing in two receptacles, a thing whose pose differs from its receptacle's, a pen in a mug, an open drawer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

START = -1
"""Initial pose of the agent: the middle of the room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts by receptacle or by thing, in the order of the house's lists. Poses are those of the house."""

    accepts: Mapping[str, frozenset[str]]
    """Types of things that can be put into each type of receptacle."""
    openable: tuple[bool, ...]
    opened: tuple[bool, ...]
    abilities: tuple[int, ...]
    """`Ability` flags of each thing."""
    places: tuple[tuple[int, ...], ...]
    """Receptacles in which each thing lies."""
    spots: tuple[tuple[int, ...], ...]
    """Poses from which a knife reaches each thing."""
    insides: tuple[tuple[int, ...], ...]
    """Things in each thing."""
    conditions: tuple[int, ...]
    """`Condition` flags of each thing."""
    start: int = START
    """Initial pose of the agent."""
    goal_text: str
    """The game's wording of the goal."""

    def to_plain(self) -> dict[str, Any]:
        """Return these facts as JSON types; `from_plain` restores them."""
        plain: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, "accepts": {kind: sorted(accepted) for kind, accepted in self.accepts.items()}}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Facts:
        """Restore facts from `to_plain`."""
        values = {name: _frozen(value) for name, value in plain.items()}
        return cls(**values | {"accepts": {kind: frozenset(names) for kind, names in plain["accepts"].items()}})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
