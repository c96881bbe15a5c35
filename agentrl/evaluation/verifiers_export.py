"""Environments as tasksets of `verifiers.v1` (verifiers 0.4), which its evaluation and its trainers play.

A module exports the classes that `verifiers_taskset` makes; its name is the taskset's. The harness plays an episode as
`agentrl eval` does, with an agent loop and the environment's limits, and sends each turn to the library's endpoint.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from agentrl.builders.episodes import build_env_pool, build_runner, sampling_params
from agentrl.config import Config
from agentrl.config.engines import OpenAIEngineConfig
from agentrl.env.lookup import resolve_environment
from agentrl.evaluation.panel import assignments, choose_tasks
from agentrl.evaluation.settings import evaluation_config
from agentrl.registry import Extra
from agentrl.rollout.policies import ChatEpisodePolicy
from agentrl.rollout.runner import Assignment
from agentrl.rollout.task_source import task_source
from agentrl.rollout.turns import derive_seed
from agentrl.serving.openai import OpenAIEngine
from agentrl.trajectory import Trajectory

EXTRA = Extra(name="verifiers", module="verifiers")
RESULT = "agentrl"
"""Key of an episode's result in the ``info`` of a trace."""
_numbers = itertools.count()


def verifiers_taskset(env: str, *, tasks: int = 100, overrides: Sequence[str] = ()) -> tuple[type[Any], type[Any]]:
    """Make the classes of a taskset and its harness for an environment.

    Args:
        env: Environment as ``name`` or ``name/split``; by default the first split that is not for training.
        tasks: Maximum number of tasks: those that `agentrl eval --tasks` plays.
        overrides: Config keys, such as ``agent.loop=tool_calling`` or ``environment.options.size=4``.

    Returns:
        A class derived from `verifiers.v1.Taskset`, and one derived from `verifiers.v1.Harness`.

    Raises:
        UsageError: verifiers 0.4 is not installed, there is no such environment, it has no tasks, or a key is not
            valid.
    """
    vf = EXTRA.load("verifiers.v1")
    environment = _config(env, overrides).sole_environment
    source = task_source(resolve_environment(environment.name), environment)
    rows = {one.task.id: one for one in assignments(choose_tasks(source, min(tasks, len(source)), seed=0), 1, seed=0)}

    class AgentRLTask(vf.Task[vf.TaskData]):  # type: ignore[misc, name-defined]
        """Task that the environment itself judges."""

        @vf.reward  # type: ignore[untyped-decorator]
        async def environment_reward(self, trace: Any) -> float:
            return float(trace.info.get(RESULT, {}).get("reward", 0.0))

        @vf.metric  # type: ignore[untyped-decorator]
        async def success(self, trace: Any) -> float:
            return float(bool(trace.info.get(RESULT, {}).get("success")))

    class AgentRLTaskset(vf.Taskset[AgentRLTask, vf.TasksetConfig]):  # type: ignore[misc, name-defined]
        """Tasks of the environment."""

        def load(self) -> Iterator[Any]:
            for name, one in rows.items():
                prompt = one.task.prompt or f"The task {name} of {env}."
                data = vf.TaskData(id=name, name=name, prompt=prompt)
                yield AgentRLTask(data, self.config.task)

    class AgentRLHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc, name-defined]
        """Player of the environment in this process."""

        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            config = _config(env, overrides, url=endpoint, model=ctx.model)
            one = rows[data.id]  # the library's rollouts of a task have no number: the id of the trace tells them apart
            played = await _play(config, replace(one, seed=derive_seed(one.seed, trace.id)), secret)
            outcome = played.outcome
            if outcome is None or outcome.is_infrastructure:
                return vf.ProgramResult(exit_code=1, stdout="", stderr=f"{outcome}: {played.error}")
            trace.info[RESULT] = {"reward": played.reward, "success": played.success, "outcome": outcome.value}
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    return AgentRLTaskset, AgentRLHarness


async def _play(config: Config, one: Assignment, key: str) -> Trajectory:
    """Play one episode with a chat service that takes a key."""
    variable = f"AGENTRL_VERIFIERS_API_KEY_{next(_numbers)}"
    assert isinstance(config.engine, OpenAIEngineConfig)
    engine = OpenAIEngine(config.engine.model_copy(update={"api_key_variable": variable}))
    pool = build_env_pool(config)
    os.environ[variable] = key
    try:
        await engine.start()
        runner = build_runner(config, pool, ChatEpisodePolicy(engine, sampling_params(config.sampling)), retries=0)
        return await runner.run(one.task, group_id=one.group_id, member=one.member, seed=one.seed)
    finally:
        del os.environ[variable]
        await engine.close()
        await pool.close()


def _config(env: str, overrides: Sequence[str], *, url: str = "http://127.0.0.1:1/v1", model: str = "policy") -> Config:
    return evaluation_config(env=env, model=model, url=url, overrides=overrides)
