"""The loop of runs that learn from fixed data: `agentrl sft`, `agentrl dpo` and `agentrl reward-model`.

prepare (model, demonstrations or pairs) ─► ranks ─► learner ─► updates (metrics.jsonl) ─► checkpoints/step-N/model

Such a run collects its data before the first update, and saves the model every few minutes, when it is stopped, and at
its end. It cannot be resumed with its optimizer and its place in the data, but another run can start from its model.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeAlias

from agentrl.builders.models import prepare_model
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.trainer import SFTConfig
from agentrl.config.usual_learning_rate import warmup_warnings
from agentrl.errors import UsageError
from agentrl.observe.checkpoints import Checkpoint, Checkpoints
from agentrl.observe.metrics import TIMING_PREFIX
from agentrl.observe.model_folder import MODEL
from agentrl.observe.progress import Phase, RunStatus, RunWatcher
from agentrl.observe.run_folder import logging_to
from agentrl.runs.record import UpdateLog
from agentrl.runs.start import Run, RunResult
from agentrl.runs.status_writer import StatusWriter
from agentrl.runs.stop import StopRequest, run_until_stopped
from agentrl.serving.launch.placement import core_warnings
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.launch import open_ranks
from agentrl.training.optimizer import LearningProgress

ProgressCallback: TypeAlias = Callable[[LearningProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A model on rank 0 with its data, ready for the first update."""

    learn: Callable[[ProgressCallback], LearningProgress]
    """Function that makes all updates, calls back after each, and returns the state after the last."""
    save: Callable[[Path], None]
    """Function that writes the model into a folder."""


class LearningRun(abc.ABC):
    """A run that learns from fixed data.

    `interruption` stops it from another thread at its next progress report.
    """

    name: ClassVar[str]
    """Prefix of the metrics."""
    section: ClassVar[str]
    """Config section of `settings`."""
    phase: ClassVar[Phase]
    """Phase of the updates."""

    def __init__(self, run: Run, *, watcher: RunWatcher | None = None, interruption: StopRequest | None = None) -> None:
        self.config, self.folder = run.config, run.folder
        self.status = RunStatus()
        self.interruption = interruption or StopRequest()
        self._watcher = watcher or RunWatcher()
        self._log = UpdateLog(run, self.status, self._watcher)
        self._saved_at = 0.0
        """Time of the latest checkpoint, or of the start, by `time.monotonic`."""
        self._saved: Checkpoint | None = None

    @property
    @abc.abstractmethod
    def settings(self) -> SFTConfig | PreferencesConfig:
        """The section with the learning rate and its schedule."""

    @abc.abstractmethod
    async def prepare(self) -> Callable[[Ranks], Learner]:
        """Find or make the model and the data, and return a function that loads the model on all ranks.

        Raises:
            UsageError: no data or model found, or the disk is full.
        """

    def run(self) -> RunResult:
        """Prepare the model and the data, learn, and save the model.

        Raises:
            UsageError: no data or model found, or the disk is full.
            ConfigError: options contradict each other, or the data belongs to a model with other tokens.
            TrainingError: the loss is not finite, or a rank died.
        """
        with (
            self.folder.in_use(),
            logging_to(self.folder.run_log, self._watcher.on_message),
            StatusWriter(
                self.folder.path,
                self.status,
                port=self.config.observe.prometheus_port,
                interruption=self.interruption,
            ),
        ):
            self._watcher.on_start(self.folder.path, self.status)
            self.enter(Phase.PREPARE)
            for warning in core_warnings(self.config):
                self.say(warning)
            load = run_until_stopped(self.prepare(), self.interruption)
            self.enter(self.phase)
            with self._log, open_ranks(self.config.trainer.processes, logs=self.folder.logs) as ranks:
                learner = load(ranks)
                self._saved_at = time.monotonic()
                with self.interruption.counts_signals():
                    final = learner.learn(partial(self._after_update, learner))
                saved = self._save(learner, final.update)
            return RunResult(
                folder=self.folder.path,
                step=final.update,
                checkpoint=str(saved.path),
                metrics=self._log.last,
                interrupted=False,
            )

    async def find_model(self) -> str:
        """Find or make the initial model, and return its folder."""
        return await prepare_model(self.config, self.folder.model, say=self.say)

    def enter(self, phase: Phase) -> None:
        """Report the start of a phase to the watcher."""
        self.interruption.raise_if_made()
        self.status.phase = phase
        self._watcher.on_status(self.status)

    def say(self, text: str) -> None:
        """Send a message to the watcher."""
        self._watcher.on_message(text)

    def _after_update(self, learner: Learner, progress: LearningProgress) -> None:
        """Record an update, and save the model if it is time, or if the run is to stop."""
        self._record(progress)
        if self.interruption.count and progress.update < progress.updates:
            self.save_stopped(learner, progress)
            self.interruption.raise_if_made()
        if time.monotonic() - self._saved_at >= 60 * self.settings.save_minutes:
            try:
                self._save(learner, progress.update)
            except UsageError as error:  # such as a full disk, which may have room again in ten minutes
                self.say(f"the model after update {progress.update} is not saved, and the training continues: {error}")

    def save_stopped(self, learner: Learner, progress: LearningProgress) -> None:
        """Save the model of a run that is stopped before its end, and say how to use it."""
        saved = self._save(learner, progress.update)
        self.say(
            f"stopped after update {progress.update} of {progress.updates}: the model is saved, but this training "
            f"cannot be resumed; start another run from the model: model.path={saved.path}"
        )

    def _record(self, progress: LearningProgress) -> None:
        if progress.update == 1:
            for warning in warmup_warnings(self.section, self.settings, updates=progress.updates):
                self.say(warning)
        skipped = bool(progress.non_finite)
        metrics = {
            f"{self.name}/loss": progress.loss,
            **{f"{self.name}/{name}": value for name, value in progress.extra.items()},
            f"{self.name}/grad_norm": progress.grad_norm,
            f"{self.name}/learning_rate": progress.learning_rate,
            f"{self.name}/updates_skipped": float(skipped),
            f"{TIMING_PREFIX}{self.name}_s": progress.seconds,
        }
        self._log.record(progress.update, metrics, updates=progress.updates, skipped=skipped)

    def _save(self, learner: Learner, update: int) -> Checkpoint:
        """Save the model after an update, unless that is done."""
        if self._saved is not None and self._saved.step == update:
            return self._saved
        phase, self.status.phase = self.status.phase, Phase.CHECKPOINT
        self._watcher.on_status(self.status)
        checkpoints = Checkpoints(self.folder.checkpoints, keep=self.config.checkpoint.keep)
        try:
            self._saved = checkpoints.save(update, lambda folder: learner.save(folder / MODEL))
        finally:
            self.status.phase, self._saved_at = phase, time.monotonic()
        self._watcher.on_checkpoint(update, self._saved.path)
        return self._saved
