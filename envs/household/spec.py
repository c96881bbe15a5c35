"""The household environment's entry in the registry."""

from __future__ import annotations

from typing import Any

from agentrl.env import EnvironmentSpec, Isolation

from .environment import HouseholdEnv
from .options import MAX_STEPS, parse_options
from .tasks import ENVIRONMENT, SPLITS, HouseholdTasks

INSTRUCTIONS = """\
You are in a room of a house and have a task. Each turn, write one command as a line of plain words. You then read what
happened.

These are examples of all commands. Replace the names and numbers by those that you have read:
go to fridge 1
open fridge 1
close fridge 1
take apple 1 from fridge 1
move apple 1 to countertop 1
heat apple 1 with microwave 1
cool apple 1 with fridge 1
clean apple 1 with sinkbasin 1
slice apple 1 with knife 1
use desklamp 1
examine apple 1
look
inventory
help

Go to one place after another until you see what you need. If a place is closed, open it. Take the thing. To make it
hot, cool or clean, go to a microwave, a fridge or a sinkbasin and write the command for it. Then go to the place that
the task names, and move the thing there. To look at a thing under a lamp, take the thing, go to the lamp and use it.
You can carry only one thing at a time. "Nothing happens." means that the command was not possible: write another
one."""
TOOL_INSTRUCTIONS = f"""\
{INSTRUCTIONS}

The commands are not tools. There is one tool for all of them, and its argument is the whole command."""


def tasks(split: str, **options: Any) -> HouseholdTasks:
    """Return the task source of a split, under the environment's options."""
    return HouseholdTasks(split, parse_options(**options))


SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=HouseholdEnv,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "The ALFWorld text game: find things in a room, clean, heat or cool them, and put them where they belong. Six"
        " kinds of tasks in 120 generated rooms; the unseen splits, valid_unseen (134 tasks) and test_unseen (1,340),"
        " use rooms that training never shows. Option size: tiny, small, medium or full (ALFWorld's size)."
    ),
    instructions=INSTRUCTIONS,
    tool_instructions=TOOL_INSTRUCTIONS,
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.INLINE,
    options={"size": "full"},
    scores={"random": 0.002, "expert": 1.0},
)
