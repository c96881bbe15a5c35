"""Writes what happens in episodes to the store, and keeps the run's status up to date."""

from __future__ import annotations

from agentrl.observe.progress import RunStatus, RunWatcher
from agentrl.observe.trajectory_store import TrajectoryStore
from agentrl.rollout.counters import RolloutObserver
from agentrl.trajectory import Trajectory, Turn


class EpisodeRecorder(RolloutObserver):
    """The observer of a run's training episodes.

    Args:
        store: Gets every turn.
        status: Counts episodes and tokens.
        watcher: Is told when the status changes.
    """

    def __init__(self, store: TrajectoryStore, status: RunStatus, watcher: RunWatcher) -> None:
        self._store = store
        self._status = status
        self._watcher = watcher

    def on_start(self, trajectory: Trajectory) -> None:
        """An attempt begins."""
        self._status.episodes_running += 1
        self._store.start(trajectory)

    def on_turn(self, trajectory: Trajectory, turn: Turn) -> None:
        """A turn is complete."""
        self._status.sampled_tokens += turn.end - turn.start
        self._store.turn(trajectory, turn)

    def on_end(self, trajectory: Trajectory) -> None:
        """An attempt ended."""
        self._status.episodes_running -= 1
        self._status.episodes_done += trajectory.outcome is None or not trajectory.outcome.is_infrastructure
        self._store.end(trajectory)
        self._watcher.on_status(self._status)
