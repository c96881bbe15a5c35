"""The options of the retail desk and of its tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentrl.errors import UsageError

from ..choices import choose_all
from .requests import Persona, TaskType

MAX_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RetailOptions:
    """What the environment and its task source are made with."""

    max_steps: int
    task_types: tuple[TaskType, ...]
    personas: tuple[Persona, ...]
    users: int | None
    """Of a split's shop; all when ``None``."""


def parse_options(
    *,
    max_steps: int = MAX_STEPS,
    task_types: Iterable[str] | None = None,
    personas: Iterable[str] | None = None,
    users: int | None = None,
) -> RetailOptions:
    """Check options as they stand in a config.

    Raises:
        UsageError: a value is not allowed.
    """
    for name, number in (("max_steps", max_steps), ("users", users)):
        if number is not None and number < 1:
            raise UsageError(f"retail's {name} is too small", got=number, expected="at least 1")
    return RetailOptions(
        max_steps=max_steps,
        task_types=choose_all(TaskType, task_types, "retail task type"),
        personas=choose_all(Persona, personas, "retail persona"),
        users=users,
    )
