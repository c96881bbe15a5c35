"""Runs while they run: the lock of the folder, the log, the status, the metrics, the result, and restarts."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from types import TracebackType
from typing import ClassVar, TypeVar

from agentrl.config.load import dump_config
from agentrl.config.step_settings import Settings
from agentrl.errors import RankLost
from agentrl.errors.deadlines import CLOSING_S
from agentrl.errors.foreign import run_in_own_thread
from agentrl.evaluation.diagnosis.finding import Finding
from agentrl.observe.checkpoints import Checkpoint, Checkpoints
from agentrl.observe.metrics import MetricsFile
from agentrl.observe.progress import Phase, RunStatus, RunWatcher
from agentrl.observe.run_folder import logging_to
from agentrl.observe.traces import EpisodeTrace
from agentrl.observe.trackers import Trackers
from agentrl.rollout.waits import WaitKind, WaitTracker
from agentrl.runs.checkpoint import StepProgress, read_progress
from agentrl.runs.start import Run, RunResult
from agentrl.runs.status_writer import StatusWriter, stall_words
from agentrl.runs.stop import StopRequest

P = TypeVar("P", bound=StepProgress)
_log = logging.getLogger(__name__)


class RunLoop:
    """A run that is being executed; each kind of run is a subclass.

    Args:
        run: Folder and config.
        watcher: Receives the progress.
        interruption: Stops the run from another thread; signals only reach the main thread.
        reason: Message about the reason for a restart.
    """

    command: ClassVar[str]
    """Command that starts and resumes such a run."""

    def __init__(
        self,
        run: Run,
        *,
        watcher: RunWatcher | None = None,
        interruption: StopRequest | None = None,
        reason: str | None = None,
    ) -> None:
        self.config, self.folder = run.config, run.folder
        self.status = RunStatus(steps=run.config.trainer.steps)
        self.interruption = interruption or StopRequest()
        self._changes, self._reason = run.changes, reason
        self._watcher = watcher or RunWatcher()
        self._waits = WaitTracker()
        self._trackers: Trackers | None = None
        self._status_writer = StatusWriter(
            run.folder.path,
            self.status,
            self._waits,
            port=run.config.observe.prometheus_port,
            interruption=self.interruption,
            resumed_by=self.command,
        )

    def enter(self, phase: Phase) -> None:
        """Report the start of a phase."""
        self.status.phase = phase
        self._watcher.on_status(self.status)

    def say(self, text: str) -> None:
        """Write a message to the run's log, and send it to the watcher."""
        _log.warning("%s", text)
        self._watcher.on_message(text)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Lock the folder in this block, and write the log and the status."""
        with (
            self.folder.in_use(),
            logging_to(self.folder.run_log, self._watcher.on_message),
            self._status_writer,
        ):
            self._watcher.on_start(self.folder.path, self.status)
            if self._reason is not None:
                self.say(self._reason)
            for change in self._changes:
                self.say(f"changed: {change} ({change.rule.why})")
            yield

    def _watch_stalls(self, stack: AsyncExitStack) -> None:
        """Report stalls of the event loop, and waits that take long."""
        found = self._waits.report_stalls(
            self.config.rollout.stall_report_s, lambda text: self.say(stall_words(text, self.folder.path))
        )
        self._status_writer.watch = stack.enter_context(found)

    def _save_changes(self) -> None:
        """Replace the config in the folder, once the run has started with the changed one."""
        if self._changes:
            self.folder.save_config(dump_config(self.config))

    def _open_metrics(self, stack: ExitStack | AsyncExitStack, position: int | None = None) -> None:
        """Open the trackers and the metrics file; it is cut to `position`, its size at the run's checkpoint.

        Raises:
            UsageError: the disk is full, or a tracker cannot be imported.
        """
        self._metrics = MetricsFile(self.folder.metrics_file)
        stack.callback(self._metrics.close)
        if position is not None:
            self._metrics.truncate(position)
        self._trackers = Trackers(
            self.config.trackers,
            folder=self.folder.logs,
            name=self.folder.path.name,
            config=self.config.model_dump(mode="json"),
        )

    def _close_trackers(self, error: BaseException | None, within_s: float = CLOSING_S) -> None:
        """Close the trackers at the end of the run, which `error` ended; abandon them after `within_s`."""
        if self._trackers is not None:
            self._trackers.close(error, within_s=within_s)

    async def _close_trackers_in_thread(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await run_in_own_thread(self._close_trackers, error)

    def _trace(self, trace: EpisodeTrace) -> None:
        if self._trackers is not None:
            self._trackers.trace(trace)

    def _record_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a finished step or update, counted from 1.

        Raises:
            UsageError: the disk is full.
        """
        with self._waits.on(WaitKind.DISK, "run", "metrics.jsonl"):
            self._metrics.append_step(step, metrics)
            assert self._trackers is not None
            self._trackers.log(step, metrics)
        self.status.step, self.status.metrics = step, metrics
        self.status.episodes_done = self.status.attempts_failed = 0
        self._watcher.on_step(step, metrics)


class TrainingLoop(RunLoop):
    """A training run that is being executed, on new or on stored episodes.

    Args:
        run: Folder and config; the run resumes from the newest checkpoint in the folder.
        watcher: Receives the progress.
        interruption: Stops the run from another thread; signals only reach the main thread.
        reason: Message about the reason for a restart.
    """

    command = "train"

    def __init__(
        self,
        run: Run,
        *,
        watcher: RunWatcher | None = None,
        interruption: StopRequest | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(run, watcher=watcher, interruption=interruption, reason=reason)
        self.step = 0
        """Number of finished steps."""
        self._settings = Settings(run.config)
        self._checkpoints = Checkpoints(run.folder.checkpoints, keep=run.config.checkpoint.keep)
        self._saved: Checkpoint | None = None
        self._last: Mapping[str, float] = {}
        self._problems: tuple[Finding, ...] = ()

    def _resume(self, kind: type[P]) -> P | None:
        """Return the progress in the newest checkpoint, and begin after its steps; ``None`` for a new run.

        Raises:
            UsageError: the checkpoint does not belong to such a run.
        """
        self._saved = self._checkpoints.newest()
        progress = None if self._saved is None else read_progress(self._saved, kind)
        self.step = self.status.step = 0 if progress is None else progress.step
        self._settings.load_state_dict({} if progress is None else progress.settings)
        self._settings.advance(self.step)
        return progress

    def _result(self, *, interrupted: bool) -> RunResult:
        """Return the result of the run, from its last step, checkpoint and diagnosis."""
        return RunResult(
            folder=self.folder.path,
            step=self.step,
            checkpoint="" if self._saved is None else str(self._saved.path),
            metrics=self._last,
            interrupted=interrupted,
            problems=self._problems,
        )


Loop = TypeVar("Loop", bound=RunLoop)


def run_with_restarts(
    run: Run, make: Callable[[Run, str | None], Loop], execute: Callable[[Loop], RunResult], request: StopRequest
) -> RunResult:
    """Run a loop to its end; start again after the loss of a rank, up to ``trainer.restarts`` times without a new step.

    Args:
        run: Folder and config.
        make: Makes a loop, with the reason for a restart.
        execute: Runs a loop.
        request: The run does not restart once its stop was requested.

    Raises:
        RankLost: no restart is left.
    """
    restarts, reached, reason = 0, 0, None
    while True:
        loop = make(run, reason)
        try:
            return execute(loop)
        except RankLost as error:
            if loop.status.step > reached:
                restarts, reached = 0, loop.status.step
            most = run.config.trainer.restarts
            if request.count or restarts >= most:
                raise
            restarts += 1
            next_step = f"the run restarts from its newest checkpoint ({restarts} of {most}: trainer.restarts)"
            reason = str(RankLost(error.what, got=error.got, hint=next_step))
        run = Run(run.folder, run.config)
        del loop  # frees the model
        gc.collect()
