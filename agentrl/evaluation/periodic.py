"""Evaluations of the policy during training, in the training process.

Without ``evaluation.engine`` training waits for an evaluation. With it, the evaluation runs during the next steps, on
an engine that keeps the weights of the evaluated step:

    after_step(8): sync the evaluation engine to version 8, start the evaluation
    after_step(9), …: metrics of the evaluation of step 8, with ``eval/at_step`` 8, once it has ended
    after_step(15), if 16 is due: wait for it
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from transformers import PreTrainedModel

from agentrl.builders.episodes import RunEnvironment, build_run_environments, close_run_environments, sampling_params
from agentrl.builders.training import TrainingParts
from agentrl.config.config import Config
from agentrl.config.derived import per_environment_configs
from agentrl.config.engines import LocalEngineConfig
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError, Outcome, UsageError
from agentrl.errors.deadlines import INTERRUPTED_CLOSING_S
from agentrl.errors.foreign import cancel_or_abandon, ignore_result
from agentrl.evaluation.evaluate import evaluate_panel
from agentrl.evaluation.panel import Panel
from agentrl.evaluation.result import EvaluationResult
from agentrl.observe.metrics import TIMING_PREFIX
from agentrl.render.renderer import Renderer
from agentrl.rollout.judges import judge_metrics
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.reward_functions import check_columns
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.task_source import task_source
from agentrl.serving.local import LocalEngine

AT_STEP = "eval/at_step"
"""Metric: the step whose weights a concurrent evaluation measured."""


class PeriodicEvaluations:
    """Evaluations of a run."""

    def __init__(self, parts: TrainingParts, config: Config, *, name: str) -> None:
        self._parts = parts
        self._config = config
        self._name = name
        self._task: asyncio.Task[dict[str, float]] | None = None
        self.running: int | None = None
        """Step that a concurrent evaluation measures."""

    def is_due(self, step: int) -> bool:
        """True if the weights after a step, counted from 1, are evaluated."""
        every = self._config.evaluation.every
        return bool(every) and (step % every == 0 or step == self._config.trainer.steps)

    def waits_after(self, step: int) -> bool:
        """True if training waits for an evaluation after this step."""
        if self._parts.evaluation is None:
            return self.is_due(step)
        return (self.is_due(step) or self.running is not None) and self._must_end(step)

    def _must_end(self, step: int) -> bool:
        """True if an evaluation has to end before the next step."""
        return step == self._config.trainer.steps or self.is_due(step + 1)

    async def after_step(self, step: int) -> dict[str, float]:
        """Evaluate if due; call it after each step.

        Returns:
            Metrics of the evaluations that ended, under ``eval/``; for several environments under ``eval/LABEL/``, and
            their means under ``eval/``.

        Raises:
            UsageError: the split does not exist, or has too few tasks.
            EngineError: the evaluation engine failed.
            TrainingError: the evaluation engine has other weights.
        """
        if self._parts.evaluation is None:
            return await self._evaluate(step, self._parts.policy) if self.is_due(step) else {}
        found = await self._collect() if self._task is not None and (self._task.done() or self.is_due(step)) else {}
        if self.is_due(step) and found.get(AT_STEP) != step:  # a resumed run has started it already
            await self.start(step)
        return found | await self._collect() if self._task is not None and self._must_end(step) else found

    async def start(self, step: int) -> None:
        """Send the trainer's weights, those of `step`, to the evaluation engine, and start its evaluation."""
        connection = self._parts.evaluation
        assert connection is not None
        assert self._task is None
        if connection.engine.version != step:  # in a resumed run it has them
            await connection.sync.sync(step)
        policy = EngineEpisodePolicy(connection.engine, self._parts.renderer, self._parts.policy.sampling)
        self.running = step
        self._task = asyncio.create_task(self._evaluate(step, policy), name=f"the evaluation of step {step}")
        self._task.add_done_callback(ignore_result)  # an interrupted run does not read its error

    async def _collect(self) -> dict[str, float]:
        """Wait for the evaluation that runs in parallel with training."""
        assert self._task is not None
        assert self.running is not None
        found = await self._task | {AT_STEP: float(self.running)}
        self._task = self.running = None
        return found

    async def close(self) -> None:
        """Cancel an evaluation that still runs."""
        if self._task is not None and not self._task.done():
            await cancel_or_abandon(self._task, INTERRUPTED_CLOSING_S)

    async def _evaluate(self, step: int, policy: EngineEpisodePolicy) -> dict[str, float]:
        return await _evaluate_all(self._parts, self._config, policy, f"{self._name}, step {step}")


async def _evaluate_all(
    parts: TrainingParts, config: Config, policy: EngineEpisodePolicy, model: str
) -> dict[str, float]:
    """Play the panel of the ``evaluation`` section in each environment."""
    policy = policy.with_sampling(sampling_params(config.evaluation_sampling), trains=False)
    results: list[EvaluationResult] = []
    metrics: dict[str, float] = {}
    for env in parts.environments:
        runner = env.runner.with_policy(policy, follows_schedules=False)
        result = await _evaluate_environment(env, runner, model)
        results.append(result)
        prefix = f"eval/{env.label}/" if config.environments else "eval/"
        metrics |= _metrics(result, prefix)
        if (judge := env.config.agent.judge) is not None:
            metrics |= judge_metrics(runner.counters.judge_counts(), judge, prefix)
    return metrics | _means(results) if config.environments else metrics


async def _evaluate_environment(env: RunEnvironment, runner: EpisodeRunner, model: str) -> EvaluationResult:
    settings = env.config.evaluation
    source = task_source(env.spec, env.config.sole_environment, split=settings.split)
    panel = _panel(env, settings.split, model, n_tasks=settings.tasks, samples=settings.samples)
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
    if result.success is None and Outcome.FINISHED not in result.outcomes:  # limits ended all episodes
        return 0.0
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
            metrics[f"{prefix}{name}"] = estimate.mean
            if estimate.is_bounded:
                metrics |= {f"{prefix}{name}_low": estimate.low, f"{prefix}{name}_high": estimate.high}
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
