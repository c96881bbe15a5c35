"""Watchers of a run: the default one is silent; the command line draws progress."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class Phase(enum.StrEnum):
    """Phases of a training step; with stale rollouts, what the run waits for."""

    PREPARE = "prepare"
    DEMONSTRATE = "demonstrate"
    WARM_START = "warm start"
    PAIRS = "pairs"
    ROLLOUT = "rollout"
    TRAIN = "train"
    SYNC = "sync"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"


@dataclass(slots=True, kw_only=True)
class RunStatus:
    """A reading of a run, changed in place while it goes on."""

    phase: Phase = Phase.PREPARE
    step: int = 0
    """Training steps (or optimizer steps of a warm start) done."""
    steps: int = 0
    """Of the whole run."""
    episodes_running: int = 0
    episodes_done: int = 0
    """Since the last training step."""
    attempts_failed: int = 0
    """Attempts that failed because of the infrastructure or the environment, since the last training step."""
    latest_failure: str = ""
    """Why the latest of them failed, on one line."""
    episodes_wanted: int = 0
    """For the next training step."""
    sampled_tokens: int = 0
    """Since the run began."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last training step."""


@dataclass(frozen=True, slots=True)
class RolloutProgress:
    """What the episodes of an evaluation have come to by now, running ones included."""

    episodes: int = 0
    """Running."""
    turns: int = 0
    tokens: int = 0
    """Of the policy's answers."""


class RunWatcher:
    """Observer of a run. Methods are called in the run's event loop: they must be quick, and never raise."""

    def on_start(self, folder: Path, status: RunStatus) -> None:
        """The run's folder exists; `status` is the object that will change."""

    def on_status(self, status: RunStatus) -> None:
        """The status changed: a phase began, or an episode ended."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A training step's metrics are written."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """A periodic evaluation is done."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """A checkpoint is on disk."""

    def on_message(self, text: str) -> None:
        """A message for the user: a stall report, a warning."""
