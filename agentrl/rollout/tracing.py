"""Recorder of what each episode of a run waits for, for trackers that trace episodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from agentrl.observe.progress import RunStatus
from agentrl.observe.traces import EpisodeTrace, TraceSpan, TraceTurn
from agentrl.observe.trajectory_store import GroupEnd
from agentrl.rollout.events import RolloutObserver
from agentrl.rollout.waits import Wait, WaitKind, WaitTracker
from agentrl.trajectory import Trajectory, Turn

RUN_KINDS = frozenset(
    {
        WaitKind.GROUPS,
        WaitKind.TRAINER,
        WaitKind.COLLECTIVE,
        WaitKind.SYNC,
        WaitKind.DISK,
        WaitKind.EXTRAS,
        WaitKind.GROUP_SCORER,
    }
)
"""Kinds of waits that belong to the training step, unless an episode waits."""


class EpisodeTracer(RolloutObserver):
    """Observer of a run's episodes that sends a trace of each attempt, and of each training step.

    The inner `observer` gets all events first; `send` is called in the event loop.
    """

    def __init__(
        self, observer: RolloutObserver, waits: WaitTracker, status: RunStatus, send: Callable[[EpisodeTrace], None]
    ) -> None:
        self._observer = observer
        self._clock = waits.clock
        self._status = status
        self._send = send
        self._epoch = time.time() - waits.clock()
        """Seconds since 1970 at the clock's zero."""
        self._episodes: dict[str, list[Wait]] = {}
        self._began: dict[str, float] = {}
        self._step: list[Wait] = []
        self._step_began = waits.clock()
        waits.listeners.append(self._on_wait)

    def _on_wait(self, wait: Wait) -> None:
        waits = self._episodes.get(wait.who)
        if waits is not None:
            waits.append(wait)
        elif wait.kind in RUN_KINDS:
            self._step.append(wait)

    def on_start(self, trajectory: Trajectory) -> None:
        """Begin a trace."""
        self._observer.on_start(trajectory)
        self._episodes[trajectory.id], self._began[trajectory.id] = [], self._clock()

    def on_turn(self, trajectory: Trajectory, turn: Turn) -> None:
        """Pass the event on."""
        self._observer.on_turn(trajectory, turn)

    def on_end(self, trajectory: Trajectory) -> None:
        """Send the trace of the attempt."""
        self._observer.on_end(trajectory)
        waits, began = self._episodes.pop(trajectory.id, []), self._began.pop(trajectory.id, self._clock())
        outcome = trajectory.outcome
        self._send(
            EpisodeTrace(
                name=trajectory.id,
                step=self._status.step + 1,
                began=began + self._epoch,
                seconds=self._clock() - began,
                spans=self._spans(waits),
                turns=[_trace_turn(turn) for turn in trajectory.turns],
                environment=trajectory.environment,
                task=trajectory.task_id,
                group=trajectory.group_id,
                attempt=trajectory.attempt,
                outcome=None if outcome is None else outcome.value,
                is_failure=outcome is not None and outcome.is_infrastructure,
                error=trajectory.error,
                reward=trajectory.reward,
                success=trajectory.success,
            )
        )

    def on_group_end(self, group_id: str, end: GroupEnd, episodes: Sequence[Trajectory]) -> None:
        """Pass the event on."""
        self._observer.on_group_end(group_id, end, episodes)

    def end_step(self, step: int) -> None:
        """Send the trace of a training step."""
        waits, self._step, now = self._step, [], self._clock()
        began, self._step_began = self._step_began, now
        self._send(
            EpisodeTrace(
                name="step", step=step, began=began + self._epoch, seconds=now - began, spans=self._spans(waits)
            )
        )

    def _spans(self, waits: Sequence[Wait]) -> list[TraceSpan]:
        return [TraceSpan(wait.kind.value, wait.what, wait.began + self._epoch, wait.seconds) for wait in waits]


def _trace_turn(turn: Turn) -> TraceTurn:
    tokens = turn.counted_tokens if turn.counted_tokens is not None else turn.end - turn.start
    return TraceTurn(turn.start, tokens, turn.stop_reason, turn.role, turn.valid)
