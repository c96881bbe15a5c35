"""The airline's entry in the registry."""

from __future__ import annotations

import importlib.resources
from typing import Any

from agentrl.env import EnvironmentSpec, Isolation

from ..desks.calls import call_text
from ..desks.toolset import write_instructions
from ..retail.role_customer import roles_of
from ..task_ids import SPLITS
from .environment import AirlineDesk, declared_tools
from .tasks import ENVIRONMENT, MAX_STEPS, AirlineTasks, parse_options

POLICY = importlib.resources.files(__package__).joinpath("data/policy.md").read_text(encoding="utf-8")
EXAMPLE = call_text("get_reservation_details", {"reservation_id": "1ABC23"})
INSTRUCTIONS, TOOL_INSTRUCTIONS = write_instructions(POLICY, declared_tools(), EXAMPLE)


def tasks(split: str, **options: Any) -> AirlineTasks:
    """Return the task source of a split, under the environment's options."""
    return AirlineTasks(split, parse_options(**options))


SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=AirlineDesk,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "The service desk of an airline, similar to tau-bench: fifteen tools over flights and reservations, a policy,"
        " and a scripted customer. Or the published tasks of tau-bench and tau2-bench (option data), with a customer"
        " that a language model plays. Solved if the database ends in the right state and the customer's question was"
        " answered."
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
