"""Checks options of environments whose values are names."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TypeVar

from agentrl.errors import UsageError, did_you_mean

E = TypeVar("E", bound=enum.StrEnum)


def choose(kind: type[E], value: str, what: str) -> E:
    """The member of an enum that `value` names.

    Raises:
        UsageError: it names none.
    """
    names = [member.value for member in kind]
    if value not in names:
        expected = f"one of {', '.join(names)}"
        raise UsageError(f"unknown {what}", got=repr(value), expected=expected, hint=did_you_mean(value, names))
    return kind(value)


def choose_all(kind: type[E], values: Iterable[str] | None, what: str) -> tuple[E, ...]:
    """The members that `values` name, without repetition; all when ``None``.

    Raises:
        UsageError: a value names none, there are none, or a bare string was given.
    """
    if values is None:
        return tuple(kind)
    chosen = [] if isinstance(values, str) else list(dict.fromkeys(choose(kind, value, what) for value in values))
    if not chosen:
        raise UsageError(f"no {what} given", got=repr(values), expected="a list of names")
    return tuple(chosen)
