"""Options of the household environment and of its tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentrl.errors import UsageError

from ..choices import choose, choose_all
from ..option_types import typed_options
from .goals import TaskType
from .scenes import Size
from .syntax import PutSyntax
from .vocabulary import Room

MAX_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class HouseholdOptions:
    """Checked options of the environment and its task source."""

    size: Size
    task_types: tuple[TaskType, ...]
    rooms: tuple[Room, ...]
    max_steps: int
    put_syntax: PutSyntax


@typed_options("household")
def parse_options(
    *,
    size: str = Size.FULL,
    task_types: Iterable[str] | None = None,
    rooms: Iterable[str] | None = None,
    max_steps: int = MAX_STEPS,
    put_syntax: str = PutSyntax.MOVE,
) -> HouseholdOptions:
    """Check the options of a config.

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
