"""Two plays of one task must show the same."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.testing.env_session import Moment
from agentrl.testing.env_subject import Broken


def require_equal(first: Sequence[Moment], second: Sequence[Moment], what: str) -> None:
    """Do nothing when both show the same.

    Raises:
        Broken: names the first moment that differs.
    """
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if repr(one) != repr(other):  # nan is not equal to itself
            raise Broken(f"{what} at observation {number}: {_difference(one, other)}")
    if len(first) != len(second):
        raise Broken(f"{what} in length: {len(first)} and {len(second)} observations")


def _difference(one: Moment, other: Moment) -> str:
    if one.observation != other.observation:
        return f"{one.observation[:60]!r} and {other.observation[:60]!r}"
    field = next(name for name in Moment._fields if repr(getattr(one, name)) != repr(getattr(other, name)))
    return f"{field} {getattr(one, field)!r} and {getattr(other, field)!r}"
