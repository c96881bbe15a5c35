"""Status of a run, and watchers that receive it; the default watcher does nothing."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.trajectory import Trajectory


class Phase(enum.StrEnum):
    """Phase of a run; with asynchronous rollouts, the part for which the run waits."""

    PREPARE = "prepare"
    DEMONSTRATE = "demonstrate"
    WARM_START = "warm start"
    PAIRS = "pairs"
    ROLLOUT = "rollout"
    TRAIN = "train"
    SYNC = "sync"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class RunningEpisode:
    """An attempt at an episode that has not ended."""

    trajectory: Trajectory
    started: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStatus:
    """State of the live traffic that a run learns from."""

    url: str
    """Address that clients connect to."""
    open: int
    """Number of sessions that have not ended."""
    waiting: int
    """Number of rewarded sessions that no batch has taken."""
    batch: int
    """Number of rewarded sessions in a batch."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts since the start of the process, by the names of the metrics ``live/…``."""


@dataclass(slots=True, kw_only=True)
class RunStatus:
    """Status of a run, updated in place."""

    phase: Phase = Phase.PREPARE
    step: int = 0
    """Number of finished training steps, or of optimizer steps of a warm start."""
    steps: int = 0
    """Number of steps of the whole run."""
    episodes_running: int = 0
    in_flight: dict[str, RunningEpisode] = field(default_factory=dict, repr=False)
    """Running episodes by id; also read by another thread."""
    episodes_done: int = 0
    """Episodes that ended since the last training step."""
    attempts_failed: int = 0
    """Attempts that failed because of the infrastructure or the environment, since the last training step."""
    latest_failure: str = ""
    """Reason for the latest failed attempt, on one line."""
    sampled_tokens: int = 0
    """Tokens sampled since the start of the run."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last training step."""


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """Progress of an evaluation's episodes, including running ones."""

    episodes: int = 0
    """Number of running episodes."""
    turns: int = 0
    tokens: int = 0
    """Tokens of the policy's answers."""


class RunWatcher:
    """Observer of a run. Methods are called in the run's event loop; they must be fast, and must not raise."""

    def on_start(self, folder: Path, status: RunStatus) -> None:
        """Handle the creation of the run's folder; `status` will be updated in place."""

    def on_status(self, status: RunStatus) -> None:
        """Handle a change of the status: a phase began, or an episode ended."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle the metrics of a finished training step."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Handle the metrics of a periodic evaluation."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Handle a saved checkpoint."""

    def on_message(self, text: str) -> None:
        """Handle a message for the user, such as a stall report or a warning."""
