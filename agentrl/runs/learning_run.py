"""The loop of runs that learn from fixed data: `agentrl sft`, `agentrl dpo` and `agentrl reward-model`.

prepare (model, demonstrations or pairs) ─► ranks ─► learner ─► updates (metrics.jsonl) ─► checkpoints/step-N

Such a run has its data before the first update. It saves its state every few minutes and when it is stopped, and
continues exactly from its newest checkpoint. At its end it saves only the model.
"""

from __future__ import annotations

import abc
import hashlib
import shlex
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from agentrl.builders.models import prepare_model
from agentrl.builders.trainers import LearnerParts
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.trainer import SFTConfig
from agentrl.config.usual_learning_rate import warmup_warnings
from agentrl.errors import UsageError
from agentrl.errors.foreign import run_in_own_thread
from agentrl.observe.checkpoints import Checkpoint, Checkpoints
from agentrl.observe.metrics import TIMING_PREFIX
from agentrl.observe.model_folder import MODEL
from agentrl.observe.progress import Phase, RunWatcher
from agentrl.render.images import ImageProcessor
from agentrl.runs.checkpoint import read_progress, write_progress
from agentrl.runs.loop import RunLoop, run_with_restarts
from agentrl.runs.start import Run, RunResult, newest_metrics
from agentrl.runs.stop import StopRequest, run_until_stopped
from agentrl.serving.launch.placement import core_warnings
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.launch import open_ranks
from agentrl.training.optimizer import LearningProgress
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningState:
    """Progress of a run in a checkpoint."""

    update: int
    """Number of updates made."""
    updates: int
    """Number of updates of the whole training."""
    metrics_position: int
    """Size in bytes of ``metrics.jsonl`` after these updates."""
    data: str
    """Digest of the data, which must be the same when the run resumes."""
    success: float | None
    """Latest success rate that was measured for ``sft.stop_at``."""
    is_over: bool
    """True if the training has ended: the checkpoint holds the model only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Initial model and data of a run."""

    base: str
    """Folder of the initial model."""
    data: str
    """Digest of the data."""
    load: Callable[[str, Ranks], LearnerParts]
    """Function that loads the model of this folder on all ranks: the initial one, or that of a checkpoint."""
    tokenizer: PreTrainedTokenizerBase
    images: ImageProcessor | None = None


class LearningRun(RunLoop, abc.ABC):
    """A run that learns from fixed data; with a checkpoint in its folder, it resumes from it.

    Args:
        run: Folder and config.
        watcher: Receives the progress.
        interruption: Stops the run from another thread after the current update.
        reason: Message about the reason for a restart.
    """

    name: ClassVar[str]
    """Prefix of the metrics."""
    section: ClassVar[str]
    """Config section of `settings`."""
    phase: ClassVar[Phase]
    """Phase of the updates."""

    def __init__(self, run: Run, *, watcher: RunWatcher, interruption: StopRequest, reason: str | None = None) -> None:
        super().__init__(run, watcher=watcher, interruption=interruption, reason=reason)
        self.status.steps = 0  # until the data is read
        self.success: float | None = None
        """Latest measured success rate."""
        self._checkpoints = Checkpoints(run.folder.checkpoints, keep=run.config.checkpoint.keep)
        self._saved_at = 0.0
        """Time of the latest checkpoint, or of the start, by `time.monotonic`."""
        self._saved: Checkpoint | None = None

    @classmethod
    def start(
        cls, run: Run, *, watcher: RunWatcher | None = None, interruption: StopRequest | None = None
    ) -> RunResult:
        """Run to the end or until a requested stop; after the loss of a rank, the run restarts.

        Raises:
            AgentRLError: as `LearningRun.run`.
            KeyboardInterrupt: as `LearningRun.run`.
        """
        request, watched = interruption or StopRequest(), watcher or RunWatcher()
        return run_with_restarts(
            run,
            lambda run, reason: cls(run, watcher=watched, interruption=request, reason=reason),
            lambda loop: loop.run(),
            request,
        )

    @property
    @abc.abstractmethod
    def settings(self) -> SFTConfig | PreferencesConfig:
        """The section with the learning rate and its schedule."""

    @abc.abstractmethod
    async def prepare(self, *, resumes: bool) -> Prepared:
        """Find or make the model and the data; a run that `resumes` takes the data that it made before.

        Raises:
            UsageError: no data or model found, or the disk is full.
        """

    def is_enough(self, parts: LearnerParts, base: str) -> bool:
        """Return True to end the training before its last update; called before each update and after the last."""
        return False

    def run(self) -> RunResult:
        """Prepare the model and the data, learn, and save the model.

        Raises:
            UsageError: no data or model found, the data is not that of the checkpoint, or the disk is full.
            ConfigError: options contradict each other, or the data belongs to a model with other tokens.
            TrainingError: the loss is not finite, or a rank died.
            KeyboardInterrupt: stopped before the first update, or a second time.
        """
        with self._running():
            self._saved = self._checkpoints.newest()
            state = None if self._saved is None else read_progress(self._saved, LearningState)
            if state is not None:
                self.status.step, self.status.steps = state.update, state.updates
            if state is None or not state.is_over:
                state = self._train(state)
            else:
                self.enter(self.phase)
                self.say(f"the training has ended after update {state.update} of {state.updates}")
            self._status_writer.is_interrupted = not state.is_over
            assert self._saved is not None
            return RunResult(
                folder=self.folder.path,
                step=state.update,
                checkpoint=str(self._saved.path),
                metrics=newest_metrics(self.folder),
                interrupted=not state.is_over,
            )

    def _train(self, state: LearningState | None) -> LearningState:
        """Train to the end or until a requested stop, and return the state of the last checkpoint."""
        self.enter(Phase.PREPARE)
        for warning in core_warnings(self.config):
            self.say(warning)
        if state is None and self.folder.metrics_file.is_file():
            self.say("the run has no checkpoint: it starts again from its first update")
        prepared = run_until_stopped(self.prepare(resumes=state is not None), self.interruption)
        self._check_same_data(prepared, state)
        self.enter(self.phase)
        with ExitStack() as stack:
            self._open_metrics(stack, 0 if state is None else state.metrics_position)
            stack.push(lambda kind, error, trace: self._close_trackers(error))
            ranks = stack.enter_context(open_ranks(self.config.trainer.processes, logs=self.folder.logs))
            parts = prepared.load(prepared.base if self._saved is None else str(self._saved.path / MODEL), ranks)
            if self._saved is not None and state is not None:
                parts.learner.checkpoint.load(self._saved.path)
                self.success = state.success
                self.say(f"resumes after update {state.update} of {state.updates}")
            self._save_changes()
            self._saved_at = time.monotonic()
            with self.interruption.counts_signals():
                try:
                    while not self.is_enough(parts, prepared.base) and parts.learner.done < parts.learner.updates:
                        self._record(parts.learner.learn())
                        if parts.learner.done < parts.learner.updates:
                            self._save_if_due(prepared, parts)
                            self.interruption.raise_if_made()
                except KeyboardInterrupt:
                    if not parts.learner.done or self.interruption.count > 1:  # the second one may end an update midway
                        raise
                    return self._save(prepared, parts, is_over=False)
            return self._save(prepared, parts, is_over=True)

    def _check_same_data(self, prepared: Prepared, state: LearningState | None) -> None:
        if state is not None and state.data != prepared.data:
            raise UsageError(
                "the data has changed since the training began, so it cannot resume exactly",
                got=f"data with the digest {prepared.data}",
                expected=f"the digest {state.data}",
                hint="restore the data, or start a new run from the model: "
                f"agentrl {self.command} … model.path={shlex.quote(str(self.folder.path))}",
            )

    async def find_base(self) -> str:
        """Find or make the initial model, and return its folder.

        If it is gone, such as an older checkpoint of another run, a resumed run without adapters needs only the
        tokenizer and the config, which its own checkpoint holds, too.
        """
        path = Path(self.config.model.path)
        may_be_gone = self.config.model.lora is None and path.is_absolute()
        if self._saved is not None and may_be_gone and not await run_in_own_thread(path.is_dir):
            return str(self._saved.path / MODEL)
        return await prepare_model(self.config, self.folder.model, say=self.say)

    def enter(self, phase: Phase) -> None:
        """Report the start of a phase, unless a stop was requested."""
        self.interruption.raise_if_made()
        super().enter(phase)

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
        if skipped:
            self.say(f"update {progress.update} skipped: gradients are not finite")
        self.status.steps = progress.updates
        self._record_step(progress.update, metrics)

    def _save_if_due(self, prepared: Prepared, parts: LearnerParts) -> None:
        if time.monotonic() - self._saved_at < 60 * self.settings.save_minutes:
            return
        try:
            self._save(prepared, parts, is_over=False)
        except UsageError as error:  # such as a full disk, which may have room again in ten minutes
            reason = UsageError(error.what, got=error.got)
            self.say(f"update {parts.learner.done} is not saved, and the training continues: {reason}")

    def _save(self, prepared: Prepared, parts: LearnerParts, *, is_over: bool) -> LearningState:
        """Save the model, and the state that a resumed run needs."""
        learner = parts.learner
        self._metrics.sync()
        state = LearningState(
            update=learner.done,
            updates=learner.updates,
            metrics_position=self._metrics.position,
            data=prepared.data,
            success=self.success,
            is_over=is_over,
        )

        def write(folder: Path) -> None:
            parts.source.save(folder / MODEL, prepared.tokenizer, prepared.images)
            if not is_over:
                learner.checkpoint.save(folder)
            write_progress(folder, state)

        phase, self.status.phase = self.status.phase, Phase.CHECKPOINT
        self._watcher.on_status(self.status)
        try:
            self._saved = self._checkpoints.save(learner.done, write)
        finally:
            self.status.phase, self._saved_at = phase, time.monotonic()
        self._watcher.on_checkpoint(learner.done, self._saved.path)
        return state


def digest_trajectories(trajectories: Iterable[Trajectory]) -> str:
    """Return a digest of the tokens of trajectories, the sources of these tokens, and the images."""
    sequences = (sequence for trajectory in trajectories for sequence in trajectory.sequences)
    return digest(
        part
        for sequence in sequences
        for part in (
            np.asarray(sequence.token_ids).tobytes(),
            np.asarray(sequence.sources).tobytes(),
            *(placed.image.checksum.encode() for placed in sequence.images),
        )
    )


def digest(parts: Iterable[bytes]) -> str:
    """Return a digest of data and of its division into parts."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()
