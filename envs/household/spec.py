"""The household environment's entry in the registry."""

from __future__ import annotations

from typing import Any

from agentrl.env import EnvironmentSpec, Isolation

from .environment import HouseholdEnv
from .options import MAX_STEPS, parse_options
from .tasks import ENVIRONMENT, SPLITS, HouseholdTasks

INSTRUCTIONS = """\
You are in a room of a house and have a task to do. Each turn you give one command, and then you read what you see.

Commands:
- go to (receptacle)
- open (receptacle)
- close (receptacle)
- take (object) from (receptacle)
- move (object) to (receptacle)
- use (object)
- heat (object) with (receptacle)
- cool (object) with (receptacle)
- clean (object) with (receptacle)
- slice (object) with (object)
- examine (receptacle or object)
- look
- inventory
- help

Replace the words in brackets by names that you have read, with their numbers. For example: go to fridge 1, or: take
apple 1 from fridge 1. You can carry one object at a time. Open what is closed before you look for something in it. A
microwave heats, a fridge cools, and a sinkbasin cleans. "Nothing happens." means that the command could not be carried
out."""


def tasks(split: str, **options: Any) -> HouseholdTasks:
    """The task source of a split, under the environment's options."""
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
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.INLINE,
    options={"size": "full"},
    scores={"random": 0.002, "expert": 1.0},
)
