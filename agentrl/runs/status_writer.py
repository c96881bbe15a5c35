"""Thread that writes a run's status every second, even while the event loop or the trainer hangs.

It takes no locks of other code: it copies the tables that the event loop changes, and formats texts from references.
Code that never releases the interpreter lock also stops this thread; readers then see an outdated status.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from agentrl.engine import PolicyEngine
from agentrl.errors import described_error
from agentrl.message import Message, encodable, plainly_written
from agentrl.models.memory import resident_bytes
from agentrl.observe.progress import LiveStatus, RunningEpisode, RunStatus
from agentrl.observe.run_status import (
    INTERVAL_S,
    BlockedLoop,
    CurrentWait,
    EngineLoad,
    EpisodeInFlight,
    EpisodeState,
    RunEnd,
    RunSnapshot,
    TurnText,
    own_pid_namespace,
    process_start,
    write_status,
)
from agentrl.observe.terminal import Speed
from agentrl.rollout.waits import StallWatch, Wait, WaitKind, WaitTracker
from agentrl.runs.prometheus import prometheus_endpoint
from agentrl.runs.stop import StopRequest

MAX_EPISODES = 200
"""Maximum number of running episodes that a status lists with their last messages."""
MAX_WAITS = 400
LAST_MESSAGES = 4
MAX_TEXT_CHARS = 2_000
"""Maximum number of characters of a message."""
RECENT_STEPS = 10
"""Number of steps from which the remaining time is estimated."""
LAST_STATUS_S = 2.0
"""Timeout in seconds of the last status at the end of a run."""
_log = logging.getLogger(__name__)

STATES = {
    WaitKind.CAPACITY: EpisodeState.WAITING,
    WaitKind.ENGINE: EpisodeState.GENERATING,
    WaitKind.SESSION_END: EpisodeState.GENERATING,
    WaitKind.TOOL: EpisodeState.TOOL,
    WaitKind.TOOLSET: EpisodeState.TOOL,
    WaitKind.ENVIRONMENT: EpisodeState.ENVIRONMENT,
    WaitKind.SCORER: EpisodeState.SCORING,
    WaitKind.GROUP_SCORER: EpisodeState.SCORING,
}
"""State of an episode by what it waits for."""


def stall_words(report: str, run: Path) -> str:
    """Return a stall report with the command that shows more."""
    return f"{report}\n  more: agentrl status {shlex.quote(str(run))}"


class StatusWriter:
    """Context manager in which a thread writes the status of a run; it records how the block ended.

    Args:
        run: Folder of the run.
        status: Status that the run updates in place.
        waits: Table of the run's waits.
        port: Port at which Prometheus can read the same, or ``None``.
        interruption: Requests to stop the run.
        resumed_by: Command that resumes the run.
    """

    def __init__(
        self,
        run: Path,
        status: RunStatus,
        waits: WaitTracker | None = None,
        *,
        port: int | None = None,
        interruption: StopRequest | None = None,
        resumed_by: str = "",
    ) -> None:
        self.engines: dict[str, PolicyEngine] = {}
        """Engines of the run by name, once they exist."""
        self.watch: StallWatch | None = None
        """Watchdog of the run's event loop, once it runs."""
        self.is_interrupted = False
        """True if the run ended before its last step."""
        self._run, self._status = run, status
        self._interruption, self._resumed_by = interruption or StopRequest(), resumed_by
        self.live: Callable[[], LiveStatus | None] = lambda: None
        """Returns the state of the live traffic that the run learns from."""
        self._waits = waits or WaitTracker()
        self._started, self._pid = time.time(), os.getpid()
        self._process_started, self._host = process_start(self._pid), socket.gethostname()
        self._speeds: dict[str, Speed] = {}
        self._ends_of_steps: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS + 1)
        self._end: tuple[RunEnd, str | None] | None = None
        self._port, self._serving = port, ExitStack()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write_until_over, name="agentrl-status", daemon=True)
        self._has_warned = False

    def __enter__(self) -> Self:
        """Start the thread.

        Raises:
            UsageError: the port is in use.
        """
        self._serving.enter_context(prometheus_endpoint(self._port, self._run.name, self._status, self.snapshot))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the last status and end the thread; give up if the disk hangs."""
        if error is None:
            self._end = RunEnd.STOPPED if self.is_interrupted else RunEnd.FINISHED, None
        elif isinstance(error, Exception):
            self._end = RunEnd.FAILED, described_error(error)
        else:
            self._end = RunEnd.STOPPED, None
        self._over.set()
        self._serving.close()
        self._thread.join(LAST_STATUS_S)

    def _write_until_over(self) -> None:
        self._write()
        while not self._over.wait(INTERVAL_S):
            self._write()
        self._write()

    def _write(self) -> None:
        try:
            write_status(self._run, self.snapshot())
        except Exception as error:  # a status must not end a run; the reason is recorded once
            if not self._has_warned:
                _log.warning("the run's status could not be written: %s", described_error(error))
            self._has_warned = True

    def snapshot(self) -> RunSnapshot:
        """Return the current status."""
        now, clock, status = time.time(), self._waits.clock(), self._status
        waits = self._waits.list_waits()
        running = list(status.in_flight.values())
        states = _states(running, waits, lambda began: now - (clock - began))
        counts = Counter(state for state, _ in states.values())
        counts[EpisodeState.WAITING] += _not_started(waits, states)
        end, error = self._end or (None, None)
        return RunSnapshot(
            pid=self._pid,
            process_started=self._process_started,
            host=self._host,
            pid_namespace=own_pid_namespace(),
            time=now,
            started=self._started,
            phase=str(status.phase),
            step=status.step,
            steps=status.steps,
            seconds_left=self._seconds_left(),
            waits=[_current(wait, now - (clock - wait.began)) for wait in waits[:MAX_WAITS]],
            waiting=len(waits),
            blocked=self._blocked_loop(now),
            episodes={state.value: counts[state] for state in EpisodeState},
            episodes_done=status.episodes_done,
            attempts_failed=status.attempts_failed,
            latest_failure=encodable(status.latest_failure),
            engines=self._loads(),
            memory_bytes=resident_bytes() or None,
            live=self.live(),
            in_flight=[_in_flight(one, *states[one.trajectory.id]) for one in running[:MAX_EPISODES]],
            resumed_by=self._resumed_by,
            stopping=self._interruption.count > 0,
            ended=now if end is not None else None,
            end=end,
            error=None if error is None else encodable(error),
        )

    def _seconds_left(self) -> float | None:
        """Estimate the seconds to the last step from the last steps; ``None`` before two of them have ended."""
        step, now = self._status.step, time.monotonic()
        if not self._ends_of_steps or self._ends_of_steps[-1][1] != step:
            self._ends_of_steps.append((now, step))
        known = list(self._ends_of_steps)[1:]  # the first entry is the start of the run
        if len(known) < 2 or known[-1][1] <= known[0][1]:
            return None
        per_step = (known[-1][0] - known[0][0]) / (known[-1][1] - known[0][1])
        return max(0.0, (self._status.steps - step) * per_step - (now - known[-1][0]))

    def _blocked_loop(self, now: float) -> BlockedLoop | None:
        blocked = None if self.watch is None else self.watch.find_blocking_code()
        return None if blocked is None else BlockedLoop(since=now - blocked.seconds, by=blocked.by)

    def _loads(self) -> list[EngineLoad]:
        found = []
        for name, engine in list(self.engines.items()):
            metrics = engine.metrics()
            speed = self._speeds.setdefault(name, Speed()).at(metrics.sampled_tokens)
            found.append(
                EngineLoad(name=name, running=metrics.running, queue=metrics.waiting, tokens_per_s=round(speed, 1))
            )
        return found


def _states(
    running: Iterable[RunningEpisode], waits: Sequence[Wait], time_of: Callable[[float], float]
) -> dict[str, tuple[EpisodeState, float]]:
    """Return the state of each running episode, with the time at which it began; the latest wait decides."""
    latest = {wait.who: wait for wait in sorted(waits, key=lambda wait: wait.began)}
    found = {}
    for one in running:
        trajectory = one.trajectory
        wait = latest.get(trajectory.id) or latest.get(trajectory.group_id)
        if wait is None:
            state = EpisodeState.SCORING if trajectory.outcome is not None else EpisodeState.LOOP
            found[trajectory.id] = state, one.started
        else:
            found[trajectory.id] = STATES.get(wait.kind, EpisodeState.LOOP), time_of(wait.began)
    return found


def _not_started(waits: Iterable[Wait], running: Iterable[str]) -> int:
    """Count the episodes that wait for their start."""
    return len({wait.who for wait in waits if wait.kind is WaitKind.CAPACITY} - set(running))


def _current(wait: Wait, since: float) -> CurrentWait:
    return CurrentWait(
        owner=wait.who,
        kind=str(wait.kind),
        what=encodable(wait.what),
        since=since,
        deadline=None if wait.deadline_s is None else since + wait.deadline_s,
        unblocks=wait.unblocked_by,
    )


def _in_flight(one: RunningEpisode, state: EpisodeState, since: float) -> EpisodeInFlight:
    trajectory = one.trajectory
    messages = list(trajectory.conversations[-1:])
    return EpisodeInFlight(
        id=trajectory.id,
        environment=trajectory.environment,
        task=encodable(trajectory.task_id),
        state=state,
        since=since,
        started=one.started,
        n_turns=len(trajectory.turns),
        turns=[_text(message) for message in (messages[0][-LAST_MESSAGES:] if messages else ())],
    )


def _text(message: Message) -> TurnText:
    text = plainly_written(message)
    if message.reasoning:
        text = f"<think>{message.reasoning}</think>\n{text}"
    if len(text) > MAX_TEXT_CHARS:
        half = MAX_TEXT_CHARS // 2 - 1
        text = f"{text[:half]} … {text[-half + 1 :]}"
    return TurnText(role=message.role, text=encodable(text))
