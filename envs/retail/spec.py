"""The retail desk's entry in the registry."""

from __future__ import annotations

import importlib.resources
from typing import Any

from agentrl.env import EnvironmentSpec, Isolation

from ..desks.calls import call_text
from ..desks.toolset import write_instructions
from ..task_ids import SPLITS
from .environment import RetailDesk
from .options import MAX_STEPS, parse_options
from .role_customer import roles_of
from .tasks import ENVIRONMENT, RetailTasks
from .tools import declared_tools

POLICY = importlib.resources.files(__package__).joinpath("data/policy.md").read_text(encoding="utf-8")
EXAMPLE = call_text("get_order_details", {"order_id": "#W1234567"})
INSTRUCTIONS, TOOL_INSTRUCTIONS = write_instructions(POLICY, declared_tools(), EXAMPLE)


def tasks(split: str, **options: Any) -> RetailTasks:
    """Return the task source of a split, under the environment's options."""
    return RetailTasks(split, parse_options(**options))


SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=RetailDesk,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "The service desk of a shop, similar to tau-bench: sixteen tools over a database, a policy, and a customer that"
        " a script or any language model plays. Solved if the database ends in the right state and the customer's"
        " question was answered."
    ),
    instructions=INSTRUCTIONS,
    answer_format="free",
    tool_instructions=TOOL_INSTRUCTIONS,
    max_turns=MAX_STEPS,
    roles_of=roles_of,
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.INLINE,
    scores={"random": 0.0, "expert": 1.0},
)
