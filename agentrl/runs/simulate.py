"""Prediction of a run's throughput, drops and bias at other staleness limits, from the run's measured durations."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, get_args

from agentrl.builders.group_extras import policy_group_size
from agentrl.config import Config, load_config
from agentrl.config.rollout import BatchOrder
from agentrl.errors import UsageError
from agentrl.observe.metrics import TIMING_PREFIX, read_metrics
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_store import read_trajectories
from agentrl.rollout.simulation import PlannedEpisode, SimulatedRun, simulate
from agentrl.task import Task
from agentrl.trajectory import Trajectory

SETTINGS: Sequence[tuple[int, BatchOrder]] = (
    (0, "windowed"),
    *((staleness, order) for staleness in (1, 2, 4, 8) for order in get_args(BatchOrder)),
)
"""Stalenesses and batch orders to compare."""
EPISODES, MIN_STEPS = 3000, 24
"""Number of simulated episodes, and minimum number of simulated steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Durations that a run measured."""

    config: Config
    groups: Sequence[Sequence[PlannedEpisode]]
    """Episodes of each group."""
    train_s: float
    """Median seconds of a trainer step."""
    sync_s: float
    """Median seconds of a weight sync."""
    step_s: float
    """Median seconds of a whole step."""

    def plan(self, task: Task, member: int) -> PlannedEpisode:
        """Return a measured episode: a task repeats the episodes of one group."""
        group = self.groups[random.Random(task.id).randrange(len(self.groups))]
        return group[member % len(group)]

    def simulate(self, max_staleness: int, batch_order: BatchOrder) -> SimulatedRun:
        """Simulate the run with another staleness."""
        batch, size = self.config.trainer.tasks_per_step, policy_group_size(self.config.algorithm)
        return simulate(
            self.plan,
            steps=max(MIN_STEPS, EPISODES // (batch * size)),
            batch=batch,
            group_size=size,
            max_staleness=max_staleness,
            batch_order=batch_order,
            max_concurrent=self.config.rollout.max_concurrent,
            train_s=self.train_s,
            sync_s=self.sync_s,
        )


def read_measured_run(run: RunDirectory) -> MeasuredRun:
    """Read the durations of a run's episodes, steps and syncs.

    Raises:
        UsageError: the run has no finished training step or no finished episode.
    """
    lines = read_metrics(run.metrics_file)
    groups: defaultdict[str, list[PlannedEpisode]] = defaultdict(list)
    for stored in read_trajectories(run.trajectories) if run.trajectories.is_dir() else ():
        if stored.trajectory.is_trainable and stored.trajectory.turns:
            groups[stored.trajectory.group_id].append(_plan_episode(stored.trajectory))
    if not groups or not any(f"{TIMING_PREFIX}train_s" in line for line in lines):
        raise UsageError(
            f"run {run.path} cannot be simulated",
            got=f"{len(lines)} training steps and {len(groups)} groups with finished episodes",
            expected="the folder of a training run with at least one step",
        )
    return MeasuredRun(
        config=load_config(str(run.config_file)),
        groups=list(groups.values()),
        train_s=_median(lines, "train_s"),
        sync_s=_median(lines, "sync_s"),
        step_s=_median(lines, "step_s"),
    )


def _plan_episode(trajectory: Trajectory) -> PlannedEpisode:
    """Return the durations of an episode's turns; the last one includes what no turn measured: reset and scoring."""
    timings = [turn.timings for turn in trajectory.turns]
    engine = [timing.engine for timing in timings]
    outside = [timing.tool + timing.env for timing in timings]
    outside[-1] += max(0.0, trajectory.metrics.get("seconds", 0.0) - sum(engine) - sum(outside))
    return PlannedEpisode(
        engine_s=engine, outside_s=outside, reward=trajectory.reward or 0.0, success=trajectory.success
    )


def _median(lines: Sequence[dict[str, Any]], name: str) -> float:
    found = [line[TIMING_PREFIX + name] for line in lines if line.get(TIMING_PREFIX + name) is not None]
    return median(found) if found else 0.0
