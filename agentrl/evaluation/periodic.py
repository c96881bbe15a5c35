"""Evaluation in the middle of training: the policy as it is now, on the engine that trains."""

from __future__ import annotations

from agentrl.assembly.environments import task_source
from agentrl.assembly.episodes import build_runner, sampling_params
from agentrl.assembly.training import TrainingParts
from agentrl.config.schema import Config
from agentrl.evaluation.evaluate import evaluate_panel
from agentrl.evaluation.panel import Panel
from agentrl.evaluation.result import EvaluationResult
from agentrl.observe.metrics import TIMING_PREFIX
from agentrl.rollout.engine_speaker import EngineSpeaker


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
