"""Evaluation in the middle of training: the policy as it is now, in this process."""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers import PreTrainedModel

from agentrl.builders.environments import task_source
from agentrl.builders.episodes import RunEnvironment, build_worlds, close_worlds, sampling_params
from agentrl.builders.training import TrainingParts
from agentrl.config.config import Config
from agentrl.config.derived import SOLE
from agentrl.config.engines import LocalEngineConfig
from agentrl.errors import UsageError
from agentrl.evaluation.evaluate import evaluate_panel
from agentrl.evaluation.panel import Panel
from agentrl.evaluation.result import EvaluationResult
from agentrl.observe.metrics import TIMING_PREFIX
from agentrl.render.renderer import Renderer
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.serving.local import LocalEngine


async def evaluate_now(parts: TrainingParts, config: Config, *, model: str) -> dict[str, float]:
    """Play the panel of the ``evaluation`` section, in each environment apart.

    Args:
        parts: The training run; its engine answers.
        config: The run.
        model: Name of the model, for the record.

    Returns:
        Metrics under ``eval/``; of several environments under ``eval/LABEL/``, with the means over them beside.

    Raises:
        UsageError: no such split, or not enough tasks in it.
    """
    sampling = sampling_params(config.evaluation.sampling or config.sampling)
    policy = EngineEpisodePolicy(parts.engine, parts.renderer, sampling)
    found = {world.label: await _evaluate_world(world, policy, model) for world in parts.worlds}
    if not config.environments:
        return _metrics(found[SOLE], "eval/")
    metrics = {name: value for label, one in found.items() for name, value in _metrics(one, f"eval/{label}/").items()}
    return metrics | _means(list(found.values()))


async def _evaluate_world(world: RunEnvironment, policy: EngineEpisodePolicy, model: str) -> EvaluationResult:
    settings = world.config.evaluation
    source = task_source(world.spec, world.config.sole_environment, split=settings.split)
    panel = Panel(
        environment=f"{world.spec.name}/{settings.split}",
        policy="engine",
        model=model,
        n_tasks=settings.tasks,
        samples=settings.samples,
        seed=world.config.run.seed,
    )
    runner = world.runner.with_policy(policy)
    return await evaluate_panel(runner, source, panel, concurrency=world.config.rollout.max_concurrent)


async def success_now(model: PreTrainedModel, renderer: Renderer, config: Config, *, n_tasks: int) -> float:
    """Share of training tasks that a model in this process solves, with the run's agent and sampling.

    Args:
        model: Plays as it is; its weights are not changed.
        renderer: Of this model.
        config: The run; of several environments the mean by their weights is taken.
        n_tasks: How many in each environment, the same ones every time; all if there are fewer.

    Raises:
        UsageError: an environment does not tell whether a task is solved.
    """
    settings = config.engine if isinstance(config.engine, LocalEngineConfig) else LocalEngineConfig()
    engine = LocalEngine(model, settings, reader=renderer.images)
    policy = EngineEpisodePolicy(engine, renderer, sampling_params(config.sampling))
    worlds = build_worlds(config, policy)
    try:
        shares = [await _success_in(world, n_tasks) for world in worlds]
    finally:
        await close_worlds(worlds)
        await engine.close()
    weighted = [share * world.weight for share, world in zip(shares, worlds, strict=True)]
    return math.fsum(weighted) / math.fsum(world.weight for world in worlds)


async def _success_in(world: RunEnvironment, n_tasks: int) -> float:
    environment = world.config.sole_environment
    source = task_source(world.spec, environment)
    panel = Panel(
        environment=f"{world.spec.name}/{environment.split}",
        policy="engine",
        model=None,
        n_tasks=min(n_tasks, len(source)),
        samples=1,
        seed=world.config.run.seed,
    )
    result = await evaluate_panel(world.runner, source, panel, concurrency=world.config.rollout.max_concurrent)
    if result.success is None:
        raise UsageError(
            f"environment {world.spec.name} does not tell whether a task is solved",
            expected='info["success"] at the end of an episode',
            hint="remove sft.stop_at",
        )
    return result.success.mean


def _means(results: Sequence[EvaluationResult]) -> dict[str, float]:
    """Success and reward as means over environments, where all of them tell; failures and seconds as sums."""
    estimates = {"success": [r.success for r in results], "reward": [r.reward for r in results]}
    means = {
        f"eval/{name}": math.fsum(e.mean for e in found if e is not None) / len(found)
        for name, found in estimates.items()
        if None not in found
    }
    failed = float(sum(result.failed for result in results))
    return {**means, "eval/failed": failed, f"{TIMING_PREFIX}evaluate_s": math.fsum(r.seconds for r in results)}


def _metrics(result: EvaluationResult, prefix: str) -> dict[str, float]:
    metrics = {
        f"{prefix}turns": result.turns,
        f"{prefix}tokens": result.tokens,
        f"{prefix}failed": float(result.failed),
        f"{TIMING_PREFIX}evaluate_s": result.seconds,
    }
    for name, estimate in (("success", result.success), ("reward", result.reward)):
        if estimate is not None:
            metrics |= {
                f"{prefix}{name}": estimate.mean,
                f"{prefix}{name}_low": estimate.low,
                f"{prefix}{name}_high": estimate.high,
            }
    for name, found in result.by_task_type.items():
        if found.success is not None:
            metrics[f"{prefix}success/{name}"] = found.success.mean
    return metrics
