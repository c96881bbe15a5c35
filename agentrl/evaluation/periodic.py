"""Evaluation in the middle of training: the policy as it is now, in this process."""

from __future__ import annotations

from transformers import PreTrainedModel

from agentrl.assembly.environments import find_environment, task_source
from agentrl.assembly.episodes import build_host, build_runner, sampling_params
from agentrl.assembly.training import TrainingParts
from agentrl.config.schema import Config, LocalEngineConfig
from agentrl.errors import UsageError
from agentrl.evaluation.evaluate import evaluate_panel
from agentrl.evaluation.panel import Panel
from agentrl.evaluation.result import EvaluationResult
from agentrl.observe.metrics import TIMING_PREFIX
from agentrl.render.renderer import Renderer
from agentrl.rollout.engine_speaker import EngineSpeaker
from agentrl.serving.local import LocalEngine


async def evaluate_now(parts: TrainingParts, config: Config, *, model: str) -> dict[str, float]:
    """Play the panel of the ``evaluation`` section.

    Args:
        parts: The training run; its engine answers.
        config: The run.
        model: Name of the model, for the record.

    Returns:
        Metrics under ``eval/``.

    Raises:
        UsageError: no such split, or not enough tasks in it.
    """
    settings = config.evaluation
    source = task_source(parts.spec, config.environment, split=settings.split)
    speaker = EngineSpeaker(parts.engine, parts.renderer, sampling_params(settings.sampling or config.sampling))
    panel = Panel(
        environment=f"{parts.spec.name}/{settings.split}",
        policy="engine",
        model=model,
        n_tasks=settings.tasks,
        samples=settings.samples,
        seed=config.run.seed,
    )
    runner = build_runner(config, parts.host, speaker)
    return _metrics(await evaluate_panel(runner, source, panel, concurrency=config.rollout.max_concurrent))


async def success_now(model: PreTrainedModel, renderer: Renderer, config: Config, *, n_tasks: int) -> float:
    """Share of training tasks that a model in this process solves, with the run's agent and sampling.

    Args:
        model: Plays as it is; its weights are not changed.
        renderer: Of this model.
        config: The run.
        n_tasks: How many, the same ones every time; all if there are fewer.

    Raises:
        UsageError: the environment does not tell whether a task is solved.
    """
    spec = find_environment(config.environment)
    source = task_source(spec, config.environment)
    settings = config.engine if isinstance(config.engine, LocalEngineConfig) else LocalEngineConfig()
    panel = Panel(
        environment=f"{spec.name}/{config.environment.split}",
        policy="engine",
        model=None,
        n_tasks=min(n_tasks, len(source)),
        samples=1,
        seed=config.run.seed,
    )
    engine = LocalEngine(model, settings, reader=renderer.images)
    host = build_host(config, spec=spec)
    try:
        runner = build_runner(config, host, EngineSpeaker(engine, renderer, sampling_params(config.sampling)))
        result = await evaluate_panel(runner, source, panel, concurrency=config.rollout.max_concurrent)
    finally:
        await host.close()
        await engine.close()
    if result.success is None:
        raise UsageError(
            f"environment {spec.name} does not tell whether a task is solved",
            expected='info["success"] at the end of an episode',
            hint="remove sft.stop_at",
        )
    return result.success.mean


def _metrics(result: EvaluationResult) -> dict[str, float]:
    metrics = {
        "eval/turns": result.turns,
        "eval/tokens": result.tokens,
        "eval/failed": float(result.failed),
        f"{TIMING_PREFIX}evaluate_s": result.seconds,
    }
    for name, estimate in (("success", result.success), ("reward", result.reward)):
        if estimate is not None:
            metrics |= {
                f"eval/{name}": estimate.mean,
                f"eval/{name}_low": estimate.low,
                f"eval/{name}_high": estimate.high,
            }
    for name, found in result.by_task_type.items():
        if found.success is not None:
            metrics[f"eval/success/{name}"] = found.success.mean
    return metrics
