"""The telephone company's entry in the registry."""

from __future__ import annotations

import importlib.resources
from typing import Any

from agentrl.env import EnvironmentSpec, Isolation

from ..desks.calls import call_text
from ..desks.toolset import write_instructions
from ..task_ids import SPLITS
from .environment import TelecomDesk, declared_tools
from .tasks import ENVIRONMENT, MAX_STEPS, TelecomTasks, parse_options

POLICY = importlib.resources.files(__package__).joinpath("data/policy.md").read_text(encoding="utf-8")
EXAMPLE = call_text("get_customer_by_phone", {"phone_number": "555-123-4567"})
INSTRUCTIONS, TOOL_INSTRUCTIONS = write_instructions(POLICY, declared_tools(), EXAMPLE)


def tasks(split: str, **options: Any) -> TelecomTasks:
    """Return the task source of a split, under the environment's options."""
    return TelecomTasks(split, parse_options(**options))


SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=TelecomDesk,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "The support desk of a telephone company, similar to tau2-bench's: tools over customers, lines and bills, a"
        " policy, and a scripted customer who changes the phone's settings as the agent says. Solved if the phone works"
        " and the database ends in the right state."
    ),
    instructions=INSTRUCTIONS,
    answer_format="free",
    tool_instructions=TOOL_INSTRUCTIONS,
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.INLINE,
    scores={"random": 0.0, "expert": 1.0},
)
