"""The options of the household environment and of its tasks."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from agentrl.errors import UsageError

from .goals import TaskType
from .scenes import Size
from .syntax import PutSyntax
from .vocabulary import Room

E = TypeVar("E", bound=enum.StrEnum)

MAX_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class HouseholdOptions:
    """What the environment and its task source are made with."""

    size: Size
    task_types: tuple[TaskType, ...]
    rooms: tuple[Room, ...]
    max_steps: int
    put_syntax: PutSyntax


def parse_options(
    *,
    size: str = Size.FULL,
    task_types: Iterable[str] | None = None,
    rooms: Iterable[str] | None = None,
    max_steps: int = MAX_STEPS,
    put_syntax: str = PutSyntax.MOVE,
) -> HouseholdOptions:
    """Check options as they stand in a config.

    Raises:
        UsageError: a value is not allowed, or the rooms allow none of the task types.
    """
    options = HouseholdOptions(
        size=choose(Size, size, "household size"),
        task_types=choose_all(TaskType, task_types, "household task type"),
        rooms=choose_all(Room, rooms, "household room"),
        max_steps=max_steps,
        put_syntax=choose(PutSyntax, put_syntax, "household put_syntax"),
    )
    if max_steps < 1:
        raise UsageError("household max_steps is too small", got=max_steps, expected="at least 1")
    if not any(room in task_type.rooms for task_type in options.task_types for room in options.rooms):
        raise UsageError(
            "these household rooms allow none of these task types",
            got=f"rooms {', '.join(options.rooms)}; task types {', '.join(options.task_types)}",
            expected="; ".join(f"{task_type} in {' or '.join(task_type.rooms)}" for task_type in options.task_types),
        )
    return options


def choose(kind: type[E], value: str, what: str) -> E:
    """The member of an enum that `value` names.

    Raises:
        UsageError: it names none.
    """
    names = [member.value for member in kind]
    if value not in names:
        near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else None
        raise UsageError(f"unknown {what}", got=repr(value), expected=f"one of {', '.join(names)}", hint=hint)
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
