"""The environments of a run, each with what plays its episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.assembly.environments import find_environment, task_source
from agentrl.assembly.episodes import build_host, build_runner
from agentrl.assembly.tools import check_tools
from agentrl.config.curriculum import CurriculumConfig
from agentrl.config.parts import parts_of
from agentrl.config.schema import Config
from agentrl.curriculum.mixture import Mixture
from agentrl.env import EnvironmentSpec
from agentrl.rollout.counters import RolloutCounters, RolloutObserver
from agentrl.rollout.environments import EnvironmentHost
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.speaker import Speaker
from agentrl.rollout.stall import Waits
from agentrl.rollout.tool_desk import ToolDesk


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One environment of a run, ready to be played."""

    label: str
    """As the user calls it; empty for the only one."""
    weight: float
    config: Config
    """The run's, with this environment alone and the agent as it is there."""
    spec: EnvironmentSpec
    host: EnvironmentHost
    runner: EpisodeRunner


def build_worlds(config: Config, speaker: Speaker, *, observer: RolloutObserver | None = None) -> tuple[World, ...]:
    """The worlds of a run, in the order of its config; they share their waits and counters.

    Raises:
        UsageError: an environment that is not there.
        ConfigError: options that an agent loop or a tool does not take.
    """
    check_tools(config)
    waits, counters, worlds = Waits(), RolloutCounters(), []
    desk = ToolDesk(waits.clock)
    for part in parts_of(config):
        spec = find_environment(part.config.sole_environment)
        host = build_host(part.config, spec=spec, waits=waits)
        runner = build_runner(part.config, host, speaker, observer=observer, counters=counters, desk=desk)
        worlds.append(
            World(label=part.label, weight=part.weight, config=part.config, spec=spec, host=host, runner=runner)
        )
    return tuple(worlds)


async def close_worlds(worlds: Sequence[World]) -> None:
    """Close their environments. No episode may be running."""
    await asyncio.gather(*(world.host.close() for world in worlds))


def build_mixture(config: Config, *, curriculum: CurriculumConfig | None = None) -> Mixture:
    """The order in which a run plays its tasks.

    Args:
        config: The run.
        curriculum: Pools and horizon; neither when left out.

    Raises:
        UsageError: an environment, a split or a file of tasks that is not there.
    """
    parts = parts_of(config)
    environments = {part.label: part.config.sole_environment for part in parts}
    return Mixture(
        {label: task_source(find_environment(found), found) for label, found in environments.items()},
        seed=config.run.seed,
        weights={part.label: part.weight for part in parts},
        curriculum=curriculum,
    )
