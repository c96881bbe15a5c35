"""The telephone company's entry in the registry."""

from __future__ import annotations

import importlib.resources
from typing import Any

from agentrl.env import EnvironmentSpec, Isolation

from ..desks.calls import call_text
from ..desks.toolset import describe_tools
from ..task_ids import SPLITS
from .environment import TelecomDesk, declared_tools
from .tasks import ENVIRONMENT, MAX_STEPS, TelecomTasks, parse_options

POLICY = importlib.resources.files(__package__).joinpath("data/policy.md").read_text(encoding="utf-8")
INSTRUCTIONS = f"""\
{POLICY}
# How to act
Each turn, either talk to the customer in plain words, or call one of these tools:

{describe_tools(declared_tools())}

To call a tool, write one JSON object and nothing else, for example:
{call_text("get_customer_by_phone", {"phone_number": "555-123-4567"})}"""
TOOL_INSTRUCTIONS = f"""\
{POLICY}
# How to act
Each turn, either call one tool, or talk to the customer in plain words. The customer reads every answer that calls no
tool."""


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
