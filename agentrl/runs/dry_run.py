"""Dry run: the checks of a run's start, its estimates and its resolved config, without a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from agentrl.builders.branches import branch_rows
from agentrl.builders.deadline_checks import check_staleness
from agentrl.config.config import SCRATCH, Config
from agentrl.config.derived import EnvironmentConfigs, environment_algorithms, per_environment_configs
from agentrl.config.estimate import EstimateRow, rows
from agentrl.config.step_settings import at_largest, environment_stages, plan_rows
from agentrl.config.usual_learning_rate import rate_rows
from agentrl.env.lookup import resolve_environment
from agentrl.observe.metrics import TIMING_PREFIX, read_metrics
from agentrl.observe.model_folder import find_model
from agentrl.observe.run_folder import RunDirectory
from agentrl.rollout.environment_probe import check_environments
from agentrl.rollout.judges import judge_rows
from agentrl.rollout.loop_choice import select_default_loop
from agentrl.rollout.task_source import limited_by_tasks, task_source
from agentrl.runs.start import StartCheck, check_observers, check_tasks
from agentrl.serving.launch import usable_gpus
from agentrl.serving.launch.placement import check_cores_exist, core_warnings, gpu_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Resolved config of a run and its estimates."""

    config: Config
    rows: list[EstimateRow]


def training_rows(config: Config, *, gpus: int | None = None, step_s: float | None = None) -> list[EstimateRow]:
    """Return the estimates of a training run: sizes, learning rate, judge, and placement on `gpus` or this machine.

    Raises:
        ConfigError: the run cannot be placed on the GPUs or cores, or the staleness drops long episodes that it allows.
        UsageError: there are too few GPUs.
    """
    if gpus is None:
        check_cores_exist(config)
    placed = gpu_rows(config, len(usable_gpus(os.environ)) if gpus is None else gpus)
    late = [] if step_s is None else check_staleness(config, step_s)
    sizes = rows(limited_by_tasks(at_largest(config)))
    planned = plan_rows(config)
    return [*sizes, *late, *branch_rows(config), *rate_rows(config), *planned, *judge_rows(config), *placed]


def measured_step_s(run: RunDirectory) -> float | None:
    """Return the median seconds of a run's training steps; ``None`` before the first one."""
    name = f"{TIMING_PREFIX}step_s"
    found = [line[name] for line in read_metrics(run.metrics_file) if line.get(name) is not None]
    return median(found) if found else None


def describe_run(
    config: Config, estimates: Sequence[EstimateRow], *, check: StartCheck, say: Callable[[str], None]
) -> DryRun:
    """Make the checks of a run's start, and describe the run.

    `estimates` and `check` are those of this kind of run.

    Raises:
        UsageError: a check failed.
        TemplateError: the model's chat template does not support the agent loop.
    """
    check_observers(config)
    if config.model.path != SCRATCH and Path(find_model(config.model.path)).is_dir():
        config = select_default_loop(config, say=say)
    tasks = []
    if config.has_environment:
        check_tasks(config)
        check_environments(config)
        for stage in environment_stages(config):
            check_environments(stage.config)
        parts = per_environment_configs(config)
        tasks = [_tasks_row(part) for part in (*parts, *environment_stages(config))]
        if environment_algorithms(config):
            tasks += [_algorithm_row(part) for part in parts]
    check(config, fetch=False, say=say)
    for warning in core_warnings(config):
        say(f"warning: {warning}")
    start = [("model", config.model.path, "model.path")]
    start += [("agent loop", config.agent.loop, "agent.loop")] if config.has_environment and config.agent.loop else []
    return DryRun(config=config, rows=[*start, *tasks, *estimates])


def _tasks_row(part: EnvironmentConfigs) -> EstimateRow:
    environment = part.config.sole_environment
    spec = resolve_environment(environment.name)
    name = f"tasks of {part.label}, weight {part.weight:g}" if part.label else "tasks"
    return name, f"{len(task_source(spec, environment)):,}", f"{spec.name}/{environment.split}"


def _algorithm_row(part: EnvironmentConfigs) -> EstimateRow:
    algorithm = part.config.algorithm
    shaping = f", shaping {', '.join(algorithm.shaping)}" if algorithm.shaping else ""
    value = f"advantage {algorithm.advantage}, loss {algorithm.loss}, {algorithm.aggregation}{shaping}"
    return f"algorithm of {part.label}", value, f"environments.{part.label}.algorithm"
