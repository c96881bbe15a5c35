"""The entry of proposed programs in the registry."""

from __future__ import annotations

from typing import Any

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.task import TaskSource

from ..task_ids import SPLITS, TRAIN, check_split
from .environment import ProposedPrograms
from .options import parse_options
from .tasks import ENVIRONMENT, HeldOutTasks, ProposedProgramTasks
from .texts import INSTRUCTIONS


def tasks(split: str, **options: Any) -> TaskSource:
    """Return the task source of a split, under the environment's options."""
    parsed = parse_options(**options)
    return ProposedProgramTasks(parsed) if split == TRAIN else HeldOutTasks(check_split(split, ENVIRONMENT), parsed)


SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=ProposedPrograms,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "Puzzles about Python programs that a proposer writes and a solver solves, as in Absolute Zero: find the"
        " output (deduction), an input (abduction) or the program (induction). Half of the training tasks request a new"
        " puzzle, which is validated by execution in a sandbox; the others pose puzzles from a buffer of earlier"
        " proposals. Train with agent.loop=propose_solve, which rewards proposers for puzzles that are neither too easy"
        " nor impossible. The other splits pose generated puzzles."
    ),
    instructions=INSTRUCTIONS,
    answer_format="free",
    reward_range=(0.0, 1.0),
    isolation=Isolation.INLINE,
    scores={"random": 0.0, "expert": 1.0},
)
