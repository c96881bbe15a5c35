"""Metrics of training steps: computed from trajectories, stored exactly in ``metrics.jsonl``, sent to trackers."""

from __future__ import annotations

import importlib.util
import logging
import math
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from agentrl.errors import ConfigError, Outcome, UsageError, described_error
from agentrl.errors.deadlines import CLOSING_S
from agentrl.errors.foreign import DaemonThreads
from agentrl.observe.files import JsonLinesWriter, numbered_records, warn_damaged
from agentrl.registry import Kind, lookup, names
from agentrl.trajectory import REPAIRED_CALLS, SOLE_ROLE, Trajectory

_log = logging.getLogger(__name__)

TIMING_PREFIX = "time/"
"""Prefix of measured times; two equal runs differ only there."""

ENVIRONMENT_PREFIX = "env/"
"""Prefix of metrics of one of several environments: ``env/LABEL/success``."""

BIAS_PREFIX = "bias/"
"""Prefix of the differences between the trained episodes and those that were started: ``bias/turns``."""

MARGIN_SUFFIX = "_margin"
"""Suffix of the half-width of the interval in which chance alone keeps a difference: ``bias/turns_margin``."""

MARGIN_ERRORS = 1.96
"""Number of standard errors in a margin: an interval of 95 %."""

TRACKER_CALL_S = 30.0
"""Seconds for one call of a tracker."""
_TIMINGS = ("queue", "prefill", "decode", "tool", "env")


class MetricsFile(JsonLinesWriter):
    """Writer of one line per step: ``{"step": 3, "reward/mean": 0.25, …}``. Floats are exact, non-finite ones null."""

    def append_step(self, step: int, values: Mapping[str, float | int]) -> None:
        """Write the metrics of one step.

        Raises:
            UsageError: the disk is full.
        """
        numbers = {name: int(value) if isinstance(value, int) else float(value) for name, value in values.items()}
        self.append({"step": step, **numbers})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the metrics of all steps; none if the file does not exist.

    Damaged lines are skipped with a warning.
    """
    lines, damaged = [], list[int]()
    for number, record in numbered_records(path, damaged) if path.exists() else ():
        if isinstance(record.get("step"), int):
            lines.append(record)
        else:
            damaged.append(number)
    warn_damaged(path, damaged)
    return lines


def trajectory_metrics(
    trajectories: Sequence[Trajectory], *, version: int, adapters: Mapping[str, int] = MappingProxyType({})
) -> dict[str, float]:
    """Return reward, success, outcomes, lengths, staleness and measured seconds of a step's trajectories.

    Args:
        trajectories: All trajectories of the step, including failed ones; their order determines the last bits of
            means.
        version: Version of the weights at the start of the step.
        adapters: Versions of several adapters, by name.
    """
    trained = [t for t in trajectories if t.is_trainable]
    return {
        "episodes": len(trajectories),
        **_spread("reward", [t.reward for t in trained if t.reward is not None]),
        **_mean("success/mean", [float(t.success) for t in trained if t.success is not None]),
        **_identical(trained),
        **_outcomes(trajectories),
        **_spread("turns", [float(len(t.turns)) for t in trained]),
        **_tokens(trained),
        **_staleness(trained, version, adapters),
        **_counts(trained),
        **_repaired_calls(trained),
        **_roles(trained),
        **_seconds(trajectories),
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    mean = math.fsum(values) / len(values)
    return {
        f"{name}/mean": mean,
        f"{name}/std": math.hypot(*(value - mean for value in values)) / math.sqrt(max(1, len(values) - 1)),
        f"{name}/min": min(values),
        f"{name}/max": max(values),
    }


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: math.fsum(values) / len(values)} if values else {}


def _identical(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the share of groups with several members whose members all sampled the same tokens."""
    groups: dict[str, list[bytes]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(sampled_bytes(trajectory))
    several = [members for members in groups.values() if len(members) > 1]
    return _mean("groups/identical", [float(len(set(members)) == 1) for members in several])


def sampled_bytes(trajectory: Trajectory) -> bytes:
    """Return the sampled tokens of an episode as bytes, for comparisons."""
    return b"".join(sequence.token_ids[sequence.loss_mask].tobytes() + b"|" for sequence in trajectory.sequences)


def _outcomes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    counts = Counter(t.outcome for t in trajectories)
    return {f"outcome/{outcome.value}": counts[outcome] / max(1, len(trajectories)) for outcome in Outcome}


def _tokens(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    totals = [sum(len(s) - s.shared for s in t.sequences) for t in trajectories]
    sampled = [t.sampled_tokens for t in trajectories]
    return {
        "tokens/total": sum(totals),
        "tokens/sampled": sum(sampled),
        **_mean("tokens/per_episode", [float(total) for total in totals]),
        **_mean("tokens/sampled_per_episode", [float(count) for count in sampled]),
        "tokens/longest_sequence": max((len(s) for t in trajectories for s in t.sequences), default=0),
    }


def _staleness(trajectories: Sequence[Trajectory], version: int, adapters: Mapping[str, int]) -> dict[str, float]:
    ages = [float(age) for t in trajectories if (age := t.staleness(version, adapters)) is not None]
    return {**_mean("staleness/mean", ages), "staleness/max": max(ages, default=0.0)}


def _counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return means of the episodes' own metrics (invalid answers, tool calls, …) and reward components."""
    counts = {}
    for name, value in _means(t.metrics for t in trajectories).items():
        if name == REPAIRED_CALLS:
            continue
        counts[f"{TIMING_PREFIX if name.endswith(('_s', 'seconds')) else ''}episode/{name}"] = value
    for name, value in _means(t.reward_components for t in trajectories).items():
        counts[f"reward/component/{name}"] = value
    return counts


def _repaired_calls(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the number of repaired tool calls, if there were tools."""
    counts = [t.metrics[REPAIRED_CALLS] for t in trajectories if REPAIRED_CALLS in t.metrics]
    return {REPAIRED_CALLS: math.fsum(counts)} if counts else {}


def _means(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over all records of each name; a record without the name counts as 0."""
    rows = list(records)
    names = sorted({name for row in rows for name in row})
    return {name: math.fsum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}


def _roles(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the returns and the numbers of turns of each role, in episodes with several agents."""
    spoken: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for role, count in Counter(turn.role for turn in trajectory.turns).items():
            spoken.setdefault(role, []).append(float(count))
    metrics: dict[str, float] = {}
    for role in sorted(spoken) if spoken.keys() - {SOLE_ROLE} else ():
        returns = [found[role] for t in trajectories if role in (found := t.role_returns)]
        metrics |= {**_spread(f"role/{role}/return", returns), **_mean(f"role/{role}/turns/mean", spoken[role])}
    return metrics


def _seconds(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the seconds and shares of the engine, tools and environments in the episodes."""
    sums = {name: math.fsum(getattr(t.timings, name) for x in trajectories for t in x.turns) for name in _TIMINGS}
    engine = sums["queue"] + sums["prefill"] + sums["decode"]
    whole = engine + sums["tool"] + sums["env"]
    shares = {"engine": engine, "tool": sums["tool"], "environment": sums["env"]}
    return {
        **{f"{TIMING_PREFIX}turns/{name}_s": value for name, value in sums.items()},
        **{f"{TIMING_PREFIX}share/{name}": value / whole if whole else 0.0 for name, value in shares.items()},
    }


class Tracker(ABC):
    """Receiver of a run's metrics, constructed with the run's folder, name and config.

    Its methods are called one at a time, in a thread of their own.
    """

    package: ClassVar[str | None] = None
    """Required package, with the same name for ``pip install`` and for ``import``."""

    @abstractmethod
    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one training step."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close."""


class TensorBoardTracker(Tracker):
    """TensorBoard event files in the run's ``logs``; needs the package tensorboard (but not torch)."""

    package = "tensorboard"

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all scalars."""
        values = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbTracker(Tracker):
    """A Weights & Biases run; needs the package wandb."""

    package = "wandb"

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        identity = folder / "run_id"  # a resumed run continues the same history
        if not identity.is_file():
            identity.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project="agentrl",
            id=identity.read_text(),
            name=name,
            dir=str(folder),
            config=dict(config),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one history row."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def check_trackers(chosen: Sequence[str]) -> None:
    """Check that every named tracker can be created.

    Raises:
        UnknownNameError: no tracker has this name.
        UsageError: the tracker's package is missing, or the name is not that of a tracker.
    """
    for name in chosen:
        found = lookup(Kind.TRACKER, name)
        if not (isinstance(found, type) and issubclass(found, Tracker)):
            raise ConfigError(
                f"trackers names {name}, which is not a tracker",
                got=repr(found),
                expected="a subclass of agentrl.observe.metrics.Tracker",
            )
        package = found.package
        if package is not None and package not in sys.modules and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"tracker {name} needs the package {package}",
                got="it is not installed",
                expected=f"{package} installed, or trackers without {name}",
                hint=f"to install it: pip install {package}",
            )


def tracker_states() -> dict[str, str]:
    """Return each registered tracker with ``present``, or with the reason why it cannot be used."""
    states = {}
    for name in names(Kind.TRACKER):
        try:
            check_trackers([name])
            states[name] = "present"
        except UsageError as error:
            states[name] = f"missing; {error.hint}" if error.hint else f"cannot be used: {error}"
    return states


class _TrackerThread:
    """Thread of one tracker, which may block: its calls run there one after another, until one fails."""

    def __init__(self, kind: str, tracker: Tracker) -> None:
        self.tracker = tracker
        self.failure: str | None = None
        self._threads = DaemonThreads(f"agentrl-tracker-{kind}", limit=1)
        self._began: float | None = None
        """Time at which the running call began."""

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Run a call after the earlier ones."""
        return self._threads.submit(self._run, call)

    def is_late(self) -> bool:
        """Return True if the running call takes longer than `TRACKER_CALL_S`."""
        began = self._began
        return began is not None and time.monotonic() - began > TRACKER_CALL_S

    def _run(self, call: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        self._began = time.monotonic()
        try:
            call()
        except BaseException as error:
            self.failure = described_error(error)
        self._began = None


class Trackers:
    """All configured trackers; a tracker that fails or blocks is disabled with a warning, and the run continues.

    No call waits for a tracker, except for its end.

    Args:
        chosen: Registry names.
        folder: The run's ``logs``; each tracker gets its own folder in it.
        name: The run's name.
        config: The resolved config as plain data.

    Raises:
        UnknownNameError: no tracker has this name.
        UsageError: a tracker cannot be imported.
    """

    def __init__(self, chosen: Sequence[str], *, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        check_trackers(chosen)
        self._threads: dict[str, _TrackerThread] = {}
        for kind in chosen:
            make = lookup(Kind.TRACKER, kind)
            try:
                self._threads[kind] = _TrackerThread(kind, make(folder / kind, name, config))
            except ImportError as error:
                self.close()
                raise UsageError(f"tracker {kind} cannot be imported", got=error, expected="its packages") from error
            except Exception as error:
                _report(kind, described_error(error))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step to every tracker that has not failed."""
        sent = dict(metrics)
        for kind, thread in list(self._threads.items()):
            failure = thread.failure or (f"a call takes longer than {TRACKER_CALL_S:g} s" if thread.is_late() else None)
            if failure is None:
                thread.submit(partial(thread.tracker.log, step, sent))
            else:
                del self._threads[kind]
                _report(kind, failure)

    def close(self, *, within_s: float = CLOSING_S) -> None:
        """Close every tracker after its last call; give up those that are not closed after `within_s`."""
        closing = {kind: thread.submit(thread.tracker.close) for kind, thread in self._threads.items()}
        wait(closing.values(), timeout=within_s)
        for kind, thread in self._threads.items():
            failure = thread.failure or (None if closing[kind].done() else f"it is not closed after {within_s:g} s")
            if failure is not None:
                _report(kind, failure)
        self._threads.clear()


def _report(kind: str, failure: str) -> None:
    _log.warning("tracker %s failed; the run continues without it: %s", kind, failure)
