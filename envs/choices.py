"""Checks of environment options whose values are names."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TypeVar

from agentrl.errors import UsageError, did_you_mean

E = TypeVar("E", bound=enum.StrEnum)


def choose(kind: type[E], value: str, what: str) -> E:
    """Return the member of an enum with the value `value`.

    Raises:
        UsageError: no member has this value.
    """
    names = [member.value for member in kind]
    if value not in names:
        expected = f"one of {', '.join(names)}"
        raise UsageError(f"unknown {what}", got=repr(value), expected=expected, hint=did_you_mean(value, names))
    return kind(value)


def choose_all(kind: type[E], values: Iterable[str] | None, what: str) -> tuple[E, ...]:
    """Return the members with these values, without repetition; all members for ``None``.

    Raises:
        UsageError: a value is unknown, the list is empty, or `values` is a bare string.
    """
    if values is None:
        return tuple(kind)
    if isinstance(values, str):
        raise UsageError(f"{what} is not a list", got=repr(values), expected=f"a list of names, such as [{values}]")
    chosen = list(dict.fromkeys(choose(kind, value, what) for value in values))
    if not chosen:
        raise UsageError(f"no {what} given", got=repr(values), expected="a list of names")
    return tuple(chosen)
