"""Evaluation of the current policy during training, in the training process."""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers import PreTrainedModel

from agentrl.builders.episodes import RunEnvironment, build_run_environments, close_run_environments, sampling_params
from agentrl.builders.training import TrainingParts
from agentrl.config.config import Config
from agentrl.config.derived import SOLE, per_environment_configs
from agentrl.config.engines import LocalEngineConfig
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError, UsageError
from agentrl.evaluation.evaluate import evaluate_panel
from agentrl.evaluation.panel import Panel
from agentrl.evaluation.result import EvaluationResult
from agentrl.observe.metrics import TIMING_PREFIX
from agentrl.render.renderer import Renderer
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.reward_functions import check_columns
from agentrl.rollout.task_source import task_source
from agentrl.serving.local import LocalEngine


async def evaluate_now(parts: TrainingParts, config: Config, *, model: str) -> dict[str, float]:
    """Play the panel of the ``evaluation`` section in each environment with the run's engine.

    Returns:
        Metrics under ``eval/``; for several environments under ``eval/LABEL/``, and their means under ``eval/``.

    Raises:
        UsageError: the split does not exist, or has too few tasks.
    """
    sampling = sampling_params(config.evaluation_sampling)
    policy = parts.policy.with_sampling(sampling, trains=False)
    found = {env.label: await _evaluate_environment(env, policy, model) for env in parts.environments}
    if not config.environments:
        return _metrics(found[SOLE], "eval/")
    metrics = {name: value for label, one in found.items() for name, value in _metrics(one, f"eval/{label}/").items()}
    return metrics | _means(list(found.values()))


async def _evaluate_environment(env: RunEnvironment, policy: EngineEpisodePolicy, model: str) -> EvaluationResult:
    settings = env.config.evaluation
    source = task_source(env.spec, env.config.sole_environment, split=settings.split)
    panel = _panel(env, settings.split, model, n_tasks=settings.tasks, samples=settings.samples)
    runner = env.runner.with_policy(policy)
    return await evaluate_panel(runner, source, panel, concurrency=env.config.rollout.max_concurrent)


def _panel(env: RunEnvironment, split: str, model: str | None, *, n_tasks: int, samples: int) -> Panel:
    return Panel(
        environment=f"{env.spec.name}/{split}",
        policy="engine",
        model=model,
        n_tasks=n_tasks,
        samples=samples,
        seed=env.config.run.seed,
    )


async def success_now(model: PreTrainedModel, renderer: Renderer, config: Config, *, n_tasks: int) -> float:
    """Measure the fraction of training tasks that a model in this process solves, with the run's agent and sampling.

    Args:
        model: Model to measure; its weights do not change.
        renderer: Renderer of this model.
        config: Config of the run; the result for several environments is the weighted mean.
        n_tasks: Number of tasks of each environment, always the same tasks; all if there are fewer.

    Raises:
        UsageError: an environment does not report success.
    """
    settings = config.engine if isinstance(config.engine, LocalEngineConfig) else LocalEngineConfig()
    engine = LocalEngine(model, settings, reader=renderer.images, decode=renderer.encoder.decode)
    policy = EngineEpisodePolicy(engine, renderer, sampling_params(config.sampling), trains=False)
    environments = build_run_environments(config, policy)
    try:
        shares = [await _success_in(env, n_tasks) for env in environments]
    finally:
        try:
            await close_run_environments(environments)
        finally:
            await engine.close()
    weighted = [share * env.weight for share, env in zip(shares, environments, strict=True)]
    return math.fsum(weighted) / math.fsum(env.weight for env in environments)


async def _success_in(env: RunEnvironment, n_tasks: int) -> float:
    section = env.config.sole_environment
    source = task_source(env.spec, section)
    panel = _panel(env, section.split, None, n_tasks=min(n_tasks, len(source)), samples=1)
    result = await evaluate_panel(env.runner, source, panel, concurrency=env.config.rollout.max_concurrent)
    if result.success is None:
        raise UsageError(
            f"environment {env.spec.name} does not report success",
            expected='info["success"] at the end of an episode',
            hint="remove sft.stop_at",
        )
    return result.success.mean


def _means(results: Sequence[EvaluationResult]) -> dict[str, float]:
    """Return the means of success and reward if all environments report them, and sums of failures and seconds."""
    estimates = {"success": [r.success for r in results], "reward": [r.reward for r in results]}
    means = {
        f"eval/{name}": math.fsum(e.mean for e in found if e is not None) / len(found)
        for name, found in estimates.items()
        if None not in found
    }
    failed = float(sum(result.failures for result in results))
    return {**means, "eval/failed": failed, f"{TIMING_PREFIX}evaluate_s": math.fsum(r.seconds for r in results)}


def _metrics(result: EvaluationResult, prefix: str) -> dict[str, float]:
    metrics = {
        f"{prefix}turns": result.turns,
        f"{prefix}tokens": result.tokens,
        f"{prefix}failed": float(result.failures),
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


def check_panels(config: Config) -> None:
    """Check that the evaluations during a run have enough tasks, and that these have the columns of rewards.

    Raises:
        ConfigError: a split has too few tasks, or a task lacks a column.
        UsageError: a split does not exist.
    """
    if config.evaluation.every:
        for part in per_environment_configs(config):
            _check_panel(part.config)


def _check_panel(config: Config) -> None:
    spec = resolve_environment(config.sole_environment.name)
    split, requested = config.evaluation.split, config.evaluation.tasks
    source = task_source(spec, config.sole_environment, split=split)
    check_columns(config.agent, lambda: source)
    available = len(source)
    if requested > available:
        raise ConfigError(
            "evaluation.tasks exceeds the split of evaluations",
            got=f"{requested:,} tasks of {spec.name}/{split}",
            expected=f"at most {available:,}",
            hint=f"set evaluation.tasks={available} and more evaluation.samples, or another evaluation.split",
        )
