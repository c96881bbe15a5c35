"""Trackers, which show the metrics of a run in other programs: TensorBoard, or the user's own."""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from agentrl.errors import ConfigError, UsageError, described_error
from agentrl.errors.deadlines import CLOSING_S
from agentrl.errors.foreign import DaemonThreads
from agentrl.observe.files import replace_file
from agentrl.observe.secrets import hide_secrets
from agentrl.observe.traces import EpisodeTrace
from agentrl.registry import Kind, lookup, names

TRACKER_CALL_S = 30.0
"""Seconds for one call of a tracker."""
RUN_ID = "run_id"
"""File in a tracker's folder with the run's id in the service."""
MAX_TRACES_WAITING = 10_000
"""Maximum number of traces that wait for a tracker; later ones are dropped."""
_log = logging.getLogger(__name__)


class Tracker(ABC):
    """Receiver of a run's metrics, constructed with the run's folder, name and config.

    Its methods are called one at a time, in a thread of their own.
    """

    package: ClassVar[str | None] = None
    """Package to import."""
    distribution: ClassVar[str | None] = None
    """Name for ``pip install``, if it is not that of `package`."""
    traces: ClassVar[bool] = False
    """True to receive the traces of episodes."""

    @abstractmethod
    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one training step."""

    def trace(self, trace: EpisodeTrace) -> None:  # noqa: B027 - most trackers do not trace
        """Record the trace of an attempt at an episode, or of a training step, if `traces` is set."""

    def fail(self, reason: str) -> None:  # noqa: B027 - most trackers have no state of a run
        """Note, before `close`, that the run has failed."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close."""


class TensorBoardTracker(Tracker):
    """TensorBoard event files in the run's ``logs``; needs the package tensorboard (but not torch)."""

    package = "tensorboard"

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._start = Event, Summary, SessionLog(status=SessionLog.START)
        self._has_begun = False
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all scalars; the first one makes TensorBoard drop steps that a resumed run repeats."""
        if not self._has_begun:
            self._writer.add_event(self._event(step=step, wall_time=time.time(), session_log=self._start))
            self._has_begun = True
        values = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def run_identity(folder: Path) -> str:
    """Return the identity of a run in a tracker's service: a resumed run continues the same history."""
    folder.mkdir(parents=True, exist_ok=True)
    return known_identity(folder) or store_identity(folder, uuid.uuid4().hex)


def known_identity(folder: Path) -> str | None:
    """Return the identity of a run that has used a tracker's folder before; ``None`` if there is none."""
    identity = folder / RUN_ID
    return (identity.read_text().strip() or None) if identity.is_file() else None


def store_identity(folder: Path, identity: str) -> str:
    """Store and return the identity of a run in a tracker's service."""
    replace_file(folder / RUN_ID, identity.encode())
    return identity


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
                expected="a subclass of agentrl.observe.trackers.Tracker",
            )
        if found.package is not None and not _is_installed(found.package):
            package = found.distribution or found.package
            raise UsageError(
                f"tracker {name} needs the package {package}",
                got="it is not installed",
                expected=f"{package} installed, or trackers without {name}",
                hint=f"to install it: pip install {package}",
            )


def _is_installed(package: str) -> bool:
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that contains it
        return False


def traces_episodes(chosen: Sequence[str]) -> bool:
    """Return True if one of the named trackers takes traces of episodes."""
    return any(lookup(Kind.TRACKER, name).traces for name in chosen)


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

    def __init__(self, kind: str, make: Callable[[], Tracker]) -> None:
        self.failure: str | None = None
        self.is_slow = False
        """True if the tracker did not start within `TRACKER_CALL_S`; it gets the queued calls once it has started."""
        self.traces_dropped = 0
        """Number of traces that were dropped because the tracker is too slow."""
        self._threads = DaemonThreads(f"agentrl-tracker-{kind}", limit=1)
        self._traces_waiting = 0
        self._began: float | None = None
        """Time at which the running call began."""
        # in the thread, because it may block, and because trackers replace signal handlers in the main thread
        self._start = self._threads.submit(make)
        done, _ = wait([self._start], timeout=TRACKER_CALL_S)
        if done:
            self._start.result()  # raises its error
        self.is_slow = not done

    def submit(self, call: Callable[[Tracker], None]) -> Future[None]:
        """Run a call after the earlier ones."""
        return self._threads.submit(self._run, call)

    def trace(self, trace: EpisodeTrace) -> None:
        """Record a trace after the earlier calls; drop it if too many are waiting."""
        if self._traces_waiting >= MAX_TRACES_WAITING:
            self.traces_dropped += 1
        else:
            self._traces_waiting += 1
            self.submit(partial(self._trace, trace))

    def _trace(self, trace: EpisodeTrace, tracker: Tracker) -> None:
        self._traces_waiting -= 1
        tracker.trace(trace)

    def is_late(self) -> bool:
        """Return True if the running call takes longer than `TRACKER_CALL_S`."""
        began = self._began
        return began is not None and time.monotonic() - began > TRACKER_CALL_S

    def _run(self, call: Callable[[Tracker], None]) -> None:
        if self.failure is not None:
            return
        self._began = time.monotonic()
        try:
            call(self._start.result())
        except BaseException as error:
            self.failure = described_error(error)
        self._began = None


class Trackers:
    """All configured trackers; a tracker that fails or blocks is disabled with a warning, and the run continues.

    No call waits for a tracker, except for `close`.

    Args:
        chosen: Registry names.
        folder: The run's ``logs``; each tracker gets its own folder in it.
        name: The run's name.
        config: The resolved config as plain data; trackers get it without secrets.

    Raises:
        UnknownNameError: no tracker has this name.
        UsageError: a tracker cannot be imported.
    """

    def __init__(self, chosen: Sequence[str], *, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        check_trackers(chosen)
        config = hide_secrets(config)
        self._threads: dict[str, _TrackerThread] = {}
        for kind in chosen:
            make = lookup(Kind.TRACKER, kind)
            try:
                thread = self._threads[kind] = _TrackerThread(kind, partial(make, folder / kind, name, config))
            except ImportError as error:
                self.close()
                raise UsageError(f"tracker {kind} cannot be imported", got=error, expected="its packages") from error
            except Exception as error:
                _report(kind, described_error(error))
            else:
                if thread.is_slow:
                    _log.warning(
                        "tracker %s has not started after %g s; it gets the steps once it has", kind, TRACKER_CALL_S
                    )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step to every tracker that has not failed."""
        sent = dict(metrics)
        for kind, thread in list(self._threads.items()):
            failure = thread.failure or (f"a call takes longer than {TRACKER_CALL_S:g} s" if thread.is_late() else None)
            if failure is None:
                thread.submit(lambda tracker: tracker.log(step, sent))
            else:
                del self._threads[kind]
                _report(kind, failure)

    def trace(self, trace: EpisodeTrace) -> None:
        """Send a trace to every tracker that takes traces."""
        for kind, thread in self._threads.items():
            if lookup(Kind.TRACKER, kind).traces:
                thread.trace(trace)

    def close(self, error: BaseException | None = None, *, within_s: float = CLOSING_S) -> None:
        """Close every tracker after its last call; abandon those that are not closed within `within_s`.

        `error` ended the run. An interruption is not a failure.
        """
        if isinstance(error, Exception):
            reason = described_error(error)
            for thread in self._threads.values():
                thread.submit(lambda tracker: tracker.fail(reason))
        closing = {kind: thread.submit(lambda tracker: tracker.close()) for kind, thread in self._threads.items()}
        wait(closing.values(), timeout=within_s)
        for kind, thread in self._threads.items():
            failure = thread.failure or (None if closing[kind].done() else f"it is not closed after {within_s:g} s")
            if failure is not None:
                _report(kind, failure)
            elif thread.traces_dropped:
                _log.warning("tracker %s was too slow for %d traces", kind, thread.traces_dropped)
        self._threads.clear()


def _report(kind: str, failure: str) -> None:
    _log.warning("tracker %s failed; the run continues without it: %s", kind, failure)
