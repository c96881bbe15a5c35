"""A new model, whose tokenizer is trained on episodes of the run's environments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentrl.builders.episodes import build_env_pool, build_runner
from agentrl.config.config import Config, ScratchModelConfig
from agentrl.config.derived import per_environment_configs
from agentrl.env.lookup import resolve_environment
from agentrl.models.scratch import build_scratch_model
from agentrl.rollout.environment_probe import has_expert
from agentrl.rollout.scripted_policies import ScriptedPolicy
from agentrl.rollout.task_source import task_source
from agentrl.rollout.text_corpus import TextCollector
from agentrl.rollout.waits import WaitTracker
from agentrl.task import TaskCursor

EPISODES = 512
"""Episodes of the corpus, over all environments. The tokenizer encodes all other text by bytes or characters."""


async def write_scratch_model(
    config: Config, folder: Path, *, say: Callable[[str], None] = lambda _: None, waits: WaitTracker | None = None
) -> None:
    """Write a new model, with a tokenizer trained on episodes of the expert (of random actions without an expert).

    `say` gets a message for the user when an episode fails.

    Raises:
        UsageError: the environment cannot be played.
        ConfigError: the model's sizes are incompatible.
    """
    corpus = await scratch_corpus(config, say=say, waits=waits)
    sizes = config.model.scratch or ScratchModelConfig()
    build_scratch_model(folder, corpus, sizes, seed=config.run.seed)


async def scratch_corpus(
    config: Config, *, say: Callable[[str], None] = lambda _: None, waits: WaitTracker | None = None
) -> list[str]:
    """Return all text of some episodes, in the order of tasks; equal for equal configs."""
    parts = per_environment_configs(config)
    count = max(1, EPISODES // len(parts))
    return [text for part in parts for text in await _texts(part.config, count, say, waits)]


async def _texts(config: Config, episodes: int, say: Callable[[str], None], waits: WaitTracker | None) -> list[str]:
    """Collect the texts of one environment."""
    spec = resolve_environment(config.sole_environment.name)
    tasks = TaskCursor(task_source(spec, config.sole_environment), seed=config.run.seed)
    collector = TextCollector(ScriptedPolicy.EXPERT if has_expert(spec, config) else ScriptedPolicy.RANDOM)
    pool = build_env_pool(config, spec=spec, waits=waits)
    try:
        runner = build_runner(config, pool, collector)
        return await collector.play(runner, tasks, episodes, seed=config.run.seed, say=say)
    finally:
        await pool.close()
