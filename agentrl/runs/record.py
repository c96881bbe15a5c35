"""Records of a running run: episodes in the store, metrics of updates, times of phases."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from agentrl.builders.training import TrainingParts
from agentrl.observe.metrics import TIMING_PREFIX, trajectory_metrics
from agentrl.observe.progress import RunningEpisode, RunStatus, RunWatcher
from agentrl.observe.trajectory_store import GroupEnd, TrajectoryStore
from agentrl.rollout.branches import branch_metrics
from agentrl.rollout.events import RolloutObserver
from agentrl.rollout.group_metrics import environment_metrics, extra_rollout_metrics
from agentrl.rollout.groups import Group
from agentrl.rollout.journal import JournalFolder
from agentrl.rollout.judges import judge_metrics
from agentrl.rollout.waits import MEASURED, EngineSeconds, Wait, WaitKind, WaitTracker
from agentrl.training.report import StepReport
from agentrl.trajectory import Trajectory, Turn
from agentrl.weights import SyncReport

DIGITS = re.compile(r"\d+")
MAX_SHOWN = 5
"""Maximum number of kinds of failures that are shown; the log contains all."""
MAX_LINE_CHARS = 120


def brief(cause: str) -> str:
    r"""Return the first and the last line of an error, without a traceback between them.

    >>> brief("the program ended with 1: Traceback:\n  line 3\nKeyError: 'x'")
    "the program ended with 1: Traceback: … KeyError: 'x'"
    """
    lines = [line.strip()[:MAX_LINE_CHARS] for line in cause.splitlines() if line.strip()]
    return " … ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))


class EpisodeRecorder(RolloutObserver):
    """Observer of a run's training episodes.

    `on_group_end` is called with the fate of a group and its episodes. Failures before the first episode that ends well
    are held back unless `says_at_once`, because the error that ends a run without such an episode describes them.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        status: RunStatus,
        watcher: RunWatcher,
        waits: WaitTracker,
        on_group_end: Callable[[GroupEnd, Sequence[Trajectory]], None] = lambda end, episodes: None,
        *,
        says_at_once: bool = False,
    ) -> None:
        self._store = store
        self._waits = waits
        self._status = status
        self._watcher = watcher
        self._on_group_end = on_group_end
        self._shown: set[str] = set()
        """Kinds of failures that were shown to the user, or are held."""
        self._held: list[str] | None = None if says_at_once else []

    def on_start(self, trajectory: Trajectory) -> None:
        """Record the start of an attempt."""
        self._status.episodes_running += 1
        self._status.in_flight[trajectory.id] = RunningEpisode(trajectory, time.time())
        with self._writing(trajectory):
            self._store.start(trajectory)

    def on_turn(self, trajectory: Trajectory, turn: Turn) -> None:
        """Record a complete turn."""
        if trajectory.branches_from is None or turn.index >= trajectory.branches_from.turn:
            self._status.sampled_tokens += turn.end - turn.start
        with self._writing(trajectory):
            self._store.turn(trajectory, turn)

    def on_end(self, trajectory: Trajectory) -> None:
        """Record the end of an attempt."""
        self._status.episodes_running -= 1
        self._status.in_flight.pop(trajectory.id, None)
        outcome = trajectory.outcome
        self._status.episodes_done += outcome is None or not outcome.is_infrastructure
        with self._writing(trajectory):
            self._store.end(trajectory)
        if outcome is not None and outcome.is_retryable:
            self._note_failed(trajectory)
        elif outcome is not None and outcome.is_trainable:
            self._say_held()
        self._watcher.on_status(self._status)

    def on_group_end(self, group_id: str, end: GroupEnd, episodes: Sequence[Trajectory]) -> None:
        """Record how a group ended."""
        with self._waits.on(WaitKind.DISK, group_id, "a write to the trajectory store"):
            self._store.group(group_id, end, [episode.id for episode in episodes])
        self._on_group_end(end, episodes)

    def _writing(self, trajectory: Trajectory) -> Wait:
        return self._waits.on(WaitKind.DISK, trajectory.id, "a write to the trajectory store")

    def _note_failed(self, trajectory: Trajectory) -> None:
        """Count a failed attempt; show the user the first failure of each kind, once an episode has ended well."""
        cause = trajectory.error or str(trajectory.outcome)
        self._status.attempts_failed += 1
        self._status.latest_failure = brief(cause)
        kind = DIGITS.sub("", self._status.latest_failure)
        if kind not in self._shown and len(self._shown) < MAX_SHOWN:
            self._shown.add(kind)
            text = f"attempt {trajectory.id} failed ({trajectory.outcome}): {cause}"
            if self._held is None:
                self._watcher.on_message(text)
            else:
                self._held.append(text)

    def _say_held(self) -> None:
        held, self._held = self._held, None
        for text in held or ():
            self._watcher.on_message(text)


class JournalingRecorder(EpisodeRecorder):
    """Observer of a run's training episodes that also keeps the journals of those in flight."""

    def __init__(self, *parts: Any, journals: JournalFolder) -> None:
        super().__init__(*parts)
        self._journals = journals

    def on_start(self, trajectory: Trajectory) -> None:
        """Record the start of an attempt, and begin its journal."""
        super().on_start(trajectory)
        self._journals.begin(trajectory.id)

    def on_end(self, trajectory: Trajectory) -> None:
        """Record the end of an attempt, and then remove its journal."""
        self._journals.end_replay(trajectory)
        super().on_end(trajectory)
        self._journals.end(trajectory)


_COUNTED = ("groups_failed", "groups_stale", "groups_filtered", "retries")
_ENGINE = ("engine_s", "failed_engine_s", "discarded_engine_s")


class StepClock:
    """Timer of a step and its phases; the step begins at construction."""

    def __init__(self, parts: TrainingParts, *, price_per_hour: float | None) -> None:
        self._parts = parts
        self._price_per_hour = price_per_hour
        self._began = self._phase_began = parts.waits.clock()
        self._use_before = parts.waits.engine_use.read(self._began)
        self._use: dict[str, EngineSeconds] = {}
        self._seconds: dict[str, float] = {}
        self._waits_before = dict(parts.waits.seconds)
        self._counts_before, self._judged_before = self._counts(), self._judge_counts()
        self._busy_before = parts.engine.metrics().busy_s
        self._cpu_before = time.process_time()

    def phase_ended(self, name: str) -> None:
        """Record the end of the phase `name` and begin the next one."""
        now = self._parts.waits.clock()
        use = self._parts.waits.engine_use.read(now)
        self._seconds[name], self._use[name] = now - self._phase_began, use - self._use_before
        self._phase_began, self._use_before = now, use

    def metrics(
        self, groups: Sequence[Group], report: StepReport, sync: SyncReport | None, *, version: int
    ) -> dict[str, float]:
        """Return all metrics of the step; measured times are under ``time/``.

        Without `sync`, weight sync was abandoned; `version` is that of the new weights.
        """
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        counts = self._counts()
        sampled = self._parts.trainer.sampled_versions
        return {
            **group_metrics(groups, report, version=version - 1, adapters=sampled, has_signal=self._parts.has_signal),
            **self._parts.scheduler.tasks.metrics(),
            **self._parts.scheduler.bias.metrics(),
            **self._parts.scheduler.metrics(),
            **{f"rollout/{name}": counts[name] - self._counts_before[name] for name in _COUNTED},
            **({} if self._parts.journals is None else self._parts.journals.metrics()),
            **self._judge_metrics(),
            "version": version,
            **_sync_metrics(sync),
            **self._timings(trajectories),
        }

    def _counts(self) -> dict[str, float]:
        counters = self._parts.counters
        return {name: float(getattr(counters, name)) for name in (*_COUNTED, *_ENGINE)}

    def _judge_counts(self) -> dict[str, dict[str, float]]:
        """Return the judge's counts of training episodes and of extra rollouts, by the prefix of their metrics."""
        return {"": self._parts.counters.judge_counts(), "extras/": self._parts.extras.counters.judge_counts()}

    def _judge_metrics(self) -> dict[str, float]:
        """Return the judge's metrics of the step; empty without a judge."""
        judge = self._parts.environments[0].config.agent.judge
        if judge is None:
            return {}
        metrics: dict[str, float] = {}
        for prefix, counts in self._judge_counts().items():
            found = {name: count - self._judged_before[prefix][name] for name, count in counts.items()}
            if not prefix or any(found.values()):
                metrics |= judge_metrics(found, judge, prefix)
        return metrics

    def _timings(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the seconds of phases, their shares of the step, the seconds of waits, and the sampling speed."""
        whole = self._parts.waits.clock() - self._began
        waits = self._parts.waits.seconds
        sampled = sum(trajectory.sampled_tokens - trajectory.repeated_tokens for trajectory in trajectories)
        timings = {f"{name}_s": seconds for name, seconds in self._seconds.items()}
        timings |= {f"share/{name}": seconds / whole for name, seconds in self._seconds.items()}
        timings |= {f"wait/{kind}_s": waits[kind] - self._waits_before.get(kind, 0.0) for kind in MEASURED}
        timings |= {
            "step_s": whole,
            "cpu_s": time.process_time() - self._cpu_before,
            "tokens_per_s": sampled / whole,
            "engine_busy_s": self._parts.engine.metrics().busy_s - self._busy_before,
            **self._engine_seconds(),
            **unit_costs(trajectories, whole, self._price_per_hour),
        }
        return {TIMING_PREFIX + name: value for name, value in timings.items()}

    def _engine_seconds(self) -> dict[str, float]:
        """Split the seconds of the step's phases into useful and lost seconds of the engine."""
        counts = self._counts()
        ended, failed, discarded = (counts[name] - self._counts_before[name] for name in _ENGINE)
        failed_share = failed / ended if ended else 0.0
        discarded_share = min(discarded / ended, 1 - failed_share) if ended else 0.0
        use, sync = dict(self._use), self._use.get("sync")
        use.pop("sync", None)
        used = sum(phase.used for phase in use.values())
        return {
            "engine/useful_s": used * (1 - failed_share - discarded_share),
            "engine/lost/retries_s": used * failed_share,
            "engine/lost/discarded_s": used * discarded_share,
            "engine/lost/tools_s": sum(phase.elsewhere for phase in use.values()),
            "engine/lost/tails_s": use["rollout"].empty if "rollout" in use else 0.0,
            "engine/lost/trainer_s": use["train"].empty if "train" in use else 0.0,
            "engine/lost/syncs_s": 0.0 if sync is None else sync.whole,
        }


def unit_costs(trajectories: Sequence[Trajectory], step_s: float, price_per_hour: float | None) -> dict[str, float]:
    """Return seconds, and the cost if there is a price, per trained episode and per success.

    Example: 4 trained episodes, 2 of them successful, in a step of 36 s at 100 per hour: 9 s and 0.25 per episode, 18 s
    and 0.5 per success.

    A success is an episode whose environment reports it.
    """
    trained = [trajectory for trajectory in trajectories if trajectory.is_trainable]
    counts = {"episode": len(trained), "success": sum(trajectory.success is True for trajectory in trained)}
    seconds = {f"per_{name}": step_s / count for name, count in counts.items() if count}
    found = {f"{name}_s": value for name, value in seconds.items()}
    if price_per_hour is not None:
        price_per_s = price_per_hour / 3600
        found |= {f"cost/{name}": value * price_per_s for name, value in {"step": step_s, **seconds}.items()}
    return found


def group_metrics(
    groups: Sequence[Group],
    report: StepReport,
    *,
    version: int,
    has_signal: Callable[[Group], bool],
    adapters: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, float]:
    """Return the metrics of a step's update and of its episodes.

    `version` is that of the weights at the start of the step; `has_signal` is True for groups with a learning signal.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return {
        **{_name(name): value for name, value in report.metrics.items()},
        **trajectory_metrics(trajectories, version=version, adapters=adapters),
        **environment_metrics(groups, has_signal=has_signal),
        **extra_rollout_metrics(groups),
        **branch_metrics(groups),
    }


def _sync_metrics(sync: SyncReport | None) -> dict[str, float]:
    if sync is None:
        return {}
    apart = {f"adapter/{name}/probe_difference": value for name, value in sync.adapters.items()}
    released = {} if sync.released_bytes is None else {"sync/released_bytes": float(sync.released_bytes)}
    return {"sync/probe_difference": sync.probe_difference, **apart, **released}


def _name(name: str) -> str:
    """Return the final name of a trainer metric: timings go under ``time/``."""
    is_time = name.endswith(("seconds", "_per_s", "_s"))
    return TIMING_PREFIX + name if is_time else name
