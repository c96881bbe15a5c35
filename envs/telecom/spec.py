"""The telephone company's entry in the registry."""

from __future__ import annotations

import importlib.resources
from typing import Any

from agentrl.env import EnvironmentSpec, Instructions, Isolation

from ..desks.calls import call_text
from ..desks.toolset import write_instructions
from ..retail.role_customer import roles_of
from ..task_ids import SPLITS, NumberedTasks
from .environment import TelecomDesk, declared_tools
from .options import ENVIRONMENT, MAX_STEPS, parse_options
from .published.desk import PublishedDesk
from .published.instructions import instruct
from .published.task_source import PublishedTasks, splits_with_tasks
from .tasks import TelecomTasks

POLICY = importlib.resources.files(__package__).joinpath("data/policy.md").read_text(encoding="utf-8")
EXAMPLE = call_text("get_customer_by_phone", {"phone_number": "555-123-4567"})
INSTRUCTIONS, TOOL_INSTRUCTIONS = write_instructions(POLICY, declared_tools(), EXAMPLE)


def make(**options: Any) -> TelecomDesk | PublishedDesk:
    """Return the desk with generated tasks, or the published one."""
    return TelecomDesk(**options) if options.get("data") is None else PublishedDesk(**options)


def tasks(split: str, **options: Any) -> NumberedTasks:
    """Return the task source of a split, under the environment's options."""
    checked = parse_options(**options)
    return TelecomTasks(split, checked) if checked.data is None else PublishedTasks(split, checked)


def splits_of(**options: Any) -> tuple[str, ...]:
    """Return the splits: those of published tasks have no ``valid``."""
    checked = parse_options(**options)
    return SPLITS if checked.data is None else splits_with_tasks(checked)


def instructions_of(**options: Any) -> Instructions | None:
    """Return the instructions of published tasks; ``None`` for generated ones."""
    checked = parse_options(**options)
    return None if checked.data is None else instruct(checked)


SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=make,
    tasks=tasks,
    splits=SPLITS,
    splits_of=splits_of,
    description=(
        "The support desk of a telephone company, similar to tau2-bench's: tools over customers, lines and bills, a"
        " policy, and a scripted customer who changes the phone's settings as the agent says. Solved if the phone works"
        " and the database ends in the right state. The option data plays the published tasks of tau2-bench's telecom"
        " desk instead, without a customer or with one that a language model plays."
    ),
    instructions=INSTRUCTIONS,
    answer_format="free",
    tool_instructions=TOOL_INSTRUCTIONS,
    max_turns=MAX_STEPS,
    roles_of=roles_of,
    instructions_of=instructions_of,
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.INLINE,
    scores={"random": 0.0, "expert": 1.0},
)
