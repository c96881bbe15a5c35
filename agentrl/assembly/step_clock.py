"""Where the time of a training step went, and what the runtime counted meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence

from agentrl.assembly.training import TrainingParts
from agentrl.observe.metrics import TIMING_PREFIX
from agentrl.observe.step_metrics import trajectory_metrics
from agentrl.rollout.group import Group
from agentrl.rollout.group_metrics import companion_metrics, environment_metrics
from agentrl.rollout.stall import WaitKind
from agentrl.training.step.report import StepReport
from agentrl.trajectory import Trajectory
from agentrl.weights import SyncReport

_COUNTED = ("groups_failed", "groups_stale", "groups_filtered", "retries")


class StepClock:
    """Starts with the step; every phase is told when it ends.

    Args:
        parts: The run; its waits, counters and engine are read.
    """

    def __init__(self, parts: TrainingParts) -> None:
        self._parts = parts
        self._began = self._phase_began = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._waits_before = dict(parts.waits.seconds)
        self._counts_before = self._counts()
        self._busy_before = parts.engine.metrics().busy_s

    def phase_ended(self, name: str) -> None:
        """The phase `name` ends, and the next one begins."""
        now = time.perf_counter()
        self._seconds[name] = now - self._phase_began
        self._phase_began = now

    def metrics(
        self, groups: Sequence[Group], report: StepReport, sync: SyncReport | None, *, version: int
    ) -> dict[str, float]:
        """All numbers of the step: what follows from its data as it is, what a clock measured under ``time/``.

        Args:
            groups: What it was trained on.
            report: Of the trainer.
            sync: Of the weights; ``None`` where it was given up.
            version: Of the new weights.
        """
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        counts = self._counts()
        return {
            **{_name(name): value for name, value in report.metrics.items()},
            **trajectory_metrics(trajectories, version=version - 1),
            **environment_metrics(groups),
            **companion_metrics(groups),
            **self._parts.scheduler.tasks.metrics(),
            **{f"rollout/{name}": counts[name] - self._counts_before[name] for name in _COUNTED},
            "version": version,
            **_sync_metrics(sync),
            **self._timings(trajectories),
        }

    def _counts(self) -> dict[str, float]:
        counters = self._parts.counters
        return {name: float(getattr(counters, name)) for name in _COUNTED}

    def _timings(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Seconds of the phases, their share of the step, seconds that episodes waited, and the speed of sampling."""
        whole = time.perf_counter() - self._began
        waits = self._parts.waits.seconds
        sampled = sum(trajectory.sampled_tokens for trajectory in trajectories)
        timings = {f"{name}_s": seconds for name, seconds in self._seconds.items()}
        timings |= {f"share/{name}": seconds / whole for name, seconds in self._seconds.items()}
        timings |= {f"wait/{kind}_s": waits[kind] - self._waits_before.get(kind, 0.0) for kind in WaitKind}
        timings |= {
            "step_s": whole,
            "tokens_per_s": sampled / whole,
            "engine_busy_s": self._parts.engine.metrics().busy_s - self._busy_before,
        }
        return {TIMING_PREFIX + name: value for name, value in timings.items()}


def _sync_metrics(sync: SyncReport | None) -> dict[str, float]:
    if sync is None:
        return {}
    released = {} if sync.released_bytes is None else {"sync/released_bytes": float(sync.released_bytes)}
    return {"sync/probe_difference": sync.probe_difference, **released}


def _name(name: str) -> str:
    """Timings of the trainer go with the others."""
    is_time = name.endswith(("seconds", "_per_s", "_s"))
    return TIMING_PREFIX + name if is_time else name
