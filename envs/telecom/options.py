"""Options of the telecom desk and of its tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from agentrl.errors import UsageError

from ..choices import choose_all
from ..option_types import typed_options
from ..retail.options import ROLE
from .faults import CallerPersona, ProblemKind

ENVIRONMENT = "telecom"
MAX_STEPS = 60
POLICIES = ("manual", "workflow")
"""Published policies for technical support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelecomOptions:
    """Checked options of the environment and its task source."""

    max_steps: int
    task_types: tuple[ProblemKind, ...]
    personas: tuple[CallerPersona, ...]
    data: str | None
    """Folder of published tasks, which replace the generated ones."""
    customer: Literal["role"] | None
    policy: str
    task_set: str | None


@typed_options(ENVIRONMENT)
def parse_options(
    *,
    max_steps: int = MAX_STEPS,
    task_types: Iterable[str] | None = None,
    personas: Iterable[str] | None = None,
    data: str | None = None,
    customer: object = None,
    policy: str | None = None,
    task_set: str | None = None,
) -> TelecomOptions:
    """Check the options of a config.

    Args:
        max_steps: Number of tool calls and messages after which an episode is truncated.
        task_types: Kinds of generated problems; all if left out.
        personas: Kinds of generated customers; all if left out.
        data: Folder with tau2-bench's telecom files, whose tasks replace the generated ones.
        customer: ``role`` with `data`: the runtime plays the customer, as ``agent.roles.user``. If left out, the agent
            of a published task has the phone itself, and a ticket instead of a customer.
        policy: With `data`, the published policy for technical support: ``manual``, by default, or ``workflow``.
        task_set: With `data`, a set of the split file, such as ``base``, ``full`` or ``small``, which becomes the test
            split. If left out, the sets ``train`` and ``test`` are the splits.

    Raises:
        UsageError: a value is not allowed.
    """
    if max_steps < 1:
        raise UsageError("the option max_steps of telecom is too small", got=max_steps, expected="at least 1")
    if data is None:
        hint = "set the option data to tau2-bench's telecom folder, or leave them out"
        _refuse("generated", hint, customer=customer, policy=policy, task_set=task_set)
    else:
        _refuse("published", "leave out these or the option data", task_types=task_types, personas=personas)
    if customer not in (None, ROLE):
        raise UsageError(
            "the option customer of telecom is not valid",
            got=repr(customer),
            expected=f"{ROLE}, or nothing: the agent has the phone itself",
            hint=f"set customer: {ROLE}, and the model that plays it in agent.roles.user.engine",
        )
    if policy not in (None, *POLICIES):
        raise UsageError("unknown policy of telecom", got=repr(policy), expected=" or ".join(POLICIES))
    return TelecomOptions(
        max_steps=max_steps,
        task_types=choose_all(ProblemKind, task_types, "telecom task type"),
        personas=choose_all(CallerPersona, personas, "telecom persona"),
        data=data,
        customer=None if customer is None else ROLE,
        policy=policy or POLICIES[0],
        task_set=task_set,
    )


def _refuse(tasks: str, hint: str, **options: object) -> None:
    """Raise `UsageError` if an option of the other kind of tasks is set."""
    if given := [name for name, value in options.items() if value is not None]:
        raise UsageError(f"these options do not apply to {tasks} telecom tasks", got=", ".join(given), hint=hint)
