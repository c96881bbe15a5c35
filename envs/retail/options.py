"""Options of the retail desk and of its tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from agentrl.errors import UsageError

from ..choices import choose_all
from ..option_types import typed_options
from .requests import Persona, TaskType

MAX_STEPS = 40
ROLE: Final = "role"
"""Value of the option ``customer`` with which the runtime plays the customer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetailOptions:
    """Checked options of the environment and its task source."""

    max_steps: int
    task_types: tuple[TaskType, ...]
    personas: tuple[Persona, ...]
    users: int | None
    """Maximum number of users of a shop; ``None`` for all."""
    customer: Literal["role"] | None
    """``role`` if the runtime plays the customer; ``None`` for the script."""


@typed_options("retail")
def parse_options(
    *,
    max_steps: int = MAX_STEPS,
    task_types: Iterable[str] | None = None,
    personas: Iterable[str] | None = None,
    users: int | None = None,
    customer: object = None,
) -> RetailOptions:
    """Check the options of a config.

    Args:
        max_steps: Number of tool calls and messages after which an episode is truncated.
        task_types: Types of tasks that the seed draws from; all if left out.
        personas: Kinds of customers that the seed draws from; all if left out.
        users: Maximum number of users of the shop; all if left out.
        customer: ``role`` if the runtime plays the customer, as ``agent.roles.user``; a script if left out.

    Raises:
        UsageError: a value is not allowed.
    """
    for name, number in (("max_steps", max_steps), ("users", users)):
        if number is not None and number < 1:
            raise UsageError(f"the option {name} of retail is too small", got=number, expected="at least 1")
    if customer not in (None, ROLE):
        raise UsageError(
            "the option customer of retail is not valid",
            got=repr(customer),
            expected=f"{ROLE}, or nothing for the script",
            hint=f"set customer: {ROLE}, and the model that plays it in agent.roles.user.engine",
        )
    return RetailOptions(
        max_steps=max_steps,
        task_types=choose_all(TaskType, task_types, "retail task type"),
        personas=choose_all(Persona, personas, "retail persona"),
        users=users,
        customer=None if customer is None else ROLE,
    )
