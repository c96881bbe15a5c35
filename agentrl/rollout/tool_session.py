"""Tools without an environment: called from the command line, and by the conformance kit, as an episode would."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from agentrl.errors import UsageError
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.counters import RolloutCounters, RolloutObserver
from agentrl.rollout.episode_tools import EpisodeTools
from agentrl.rollout.stall import Waits
from agentrl.rollout.tool_desk import ToolDesk
from agentrl.rollout.turns import Recorders, TurnLog
from agentrl.sandbox import open_sandbox
from agentrl.trajectory import Trajectory

NAME = "tool-session"


@asynccontextmanager
async def tool_session(
    *, sandbox: Mapping[str, Any] | str | None = None, timeout_s: float = 30.0
) -> AsyncIterator[EpisodeTools]:
    """The tools of an episode in which nothing else happens.

    Args:
        sandbox: Where tools work that need a sandbox, as ``agent.sandbox`` says it.
        timeout_s: Deadline of calls whose tool has none of its own.
    """
    waits = Waits()
    trajectory = Trajectory(id=NAME, task_id=NAME, environment="none", seed=0, group_id=NAME)
    recorders = Recorders(waits=waits, counters=RolloutCounters(), observer=RolloutObserver())
    tools = EpisodeTools(
        TurnLog(trajectory, EpisodeLimits(tool_timeout_s=timeout_s), recorders, seed=0),
        ToolDesk(waits.clock),
        make_sandbox=None if sandbox is None else lambda: open_sandbox(sandbox),
        task_id=NAME,
        seed=0,
        act=_no_environment,
    )
    try:
        yield tools
    finally:
        await tools.close()


async def _no_environment(action: str) -> str:
    raise UsageError("there is no environment to act in", got=f"action {action!r}", hint="call the tool in an episode")
