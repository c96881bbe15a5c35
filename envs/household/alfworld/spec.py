"""ALFWorld's entry in the registry."""

from __future__ import annotations

from agentrl.env import EnvironmentSpec, Isolation

from ..options import MAX_STEPS
from ..spec import INSTRUCTIONS, TOOL_INSTRUCTIONS
from .data import SPLITS
from .environment import Engine, isolation_of, make_alfworld
from .tasks import ENVIRONMENT, alfworld_tasks

SPEC = EnvironmentSpec(
    name=ENVIRONMENT,
    make=make_alfworld,
    tasks=alfworld_tasks,
    splits=SPLITS,
    description=(
        "ALFWorld's own text games, from the data that alfworld-download puts into $ALFWORLD_DATA: 3,553 training"
        " games, 140 in seen and 134 in unseen rooms. Option engine: native (the household engine, no packages needed)"
        " or original (the packages alfworld and textworld, in worker processes)."
    ),
    instructions=INSTRUCTIONS,
    tool_instructions=TOOL_INSTRUCTIONS,
    max_turns=MAX_STEPS,
    reward_range=(0.0, 1.0),
    success_threshold=1.0,
    isolation=Isolation.INLINE,
    isolation_of=isolation_of,
    options={"engine": Engine.NATIVE.value},
)
