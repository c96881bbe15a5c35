"""The training loop. The same code is synchronous with `max_staleness` 0, one step off with 1, asynchronous with k.

    part             consumes                     produces                    waits for: is unblocked by
    ---------------  ---------------------------  --------------------------  ----------------------------------------
    scheduler        tasks, admission             complete groups             admission: `set_version` after a sync
    episodes         engine, environment          turns, trajectories         engine, environment, a free slot
    store            finished turns               trajectories/step-N.jsonl   nothing
    journals         answers, steps               inflight/, for a kill       nothing: a thread writes them
    next_batch       complete groups              a batch of groups           groups: episodes that end
    trainer.step     a batch                      new weights                 nothing (see idle_while_training)
    sync             new weights                  version + 1, verified       the engine's next token (pause)
    evaluation       the engine, or its own one   eval/ metrics               its own episodes
    metrics          everything above             a line of metrics.jsonl     nothing
    checkpoint       trainer, scheduler           checkpoints/step-N          the disk

    tasks ─► scheduler ─► episodes ─► next_batch ─► trainer.step ─► sync ─► [evaluation] ─► metrics ─► [checkpoint]
                ▲                                                    │
                └───────────────────── set_version ◄─────────────────┘

With `max_staleness` 0 no episode runs during `trainer.step`, and a killed and resumed run gives the same numbers as an
uninterrupted one. If the engine is the local one and there is one process, it shares the trainer's tensors, and nothing
at all runs during `trainer.step` (`TrainingParts.idle_while_training`). Above 0, episodes continue during training.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, TypeVar

from agentrl.builders.group_extras import check_extra_rollouts
from agentrl.builders.live import is_live
from agentrl.builders.models import prepare_model
from agentrl.builders.processes import open_processes
from agentrl.builders.training import build_training
from agentrl.config.engines import TinkerEngineConfig
from agentrl.config.usual_learning_rate import rate_warnings
from agentrl.errors import ResumableError, ServersLost, TrainingError, described_error
from agentrl.errors.foreign import DaemonThreads, call_in_thread, cancel_or_abandon
from agentrl.evaluation.diagnosis.watch import RunDiagnosis
from agentrl.evaluation.periodic import AT_STEP, PeriodicEvaluations
from agentrl.models.cores import divide_cores
from agentrl.models.threads import compute_on
from agentrl.observe.checkpoints import Checkpoint, CheckpointWriter
from agentrl.observe.model_folder import MODEL
from agentrl.observe.progress import Phase, RunWatcher
from agentrl.observe.trackers import traces_episodes
from agentrl.observe.trajectory_store import GroupEnd, TrajectoryStore, void_after
from agentrl.rollout.events import RolloutObserver
from agentrl.rollout.finished_episodes import RecoveredEpisodes, read_recoverable
from agentrl.rollout.groups import Group
from agentrl.rollout.heap import collect_settled_heap, settled_heap
from agentrl.rollout.journal import JournalFolder
from agentrl.rollout.live import first_step_to_read
from agentrl.rollout.tracing import EpisodeTracer
from agentrl.rollout.waits import WaitKind
from agentrl.runs.checkpoint import Progress, copy_checkpoint, restore, write_checkpoint
from agentrl.runs.diagnosis import open_diagnosis, report_problems, save_failures
from agentrl.runs.loop import TrainingLoop, run_with_restarts
from agentrl.runs.record import EpisodeRecorder, JournalingRecorder, StepClock
from agentrl.runs.start import Run, RunResult, finished_result
from agentrl.runs.stop import PHASE_GRACE_S, StopRequest, close_in_thread, close_together, run_until_stopped
from agentrl.runs.stored_training import StoredTraining
from agentrl.runs.token_tables import TokenTables
from agentrl.serving.launch.placement import core_warnings
from agentrl.training.report import StepReport
from agentrl.weights import SyncReport

T = TypeVar("T")
SYNC_GRACE_S = 6.0
"""Grace period in seconds of a weight sync after a stop request; a resumed run repeats an unfinished sync."""
_log = logging.getLogger(__name__)


class _Interrupted(Exception):
    """Signal that a stop was requested."""


class Orchestrator(TrainingLoop):
    """Training loop of one run, until its last step or a requested stop."""

    def __init__(
        self,
        run: Run,
        *,
        watcher: RunWatcher | None = None,
        interruption: StopRequest | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(run, watcher=watcher, interruption=interruption, reason=reason)
        is_remote = isinstance(run.config.engine, TinkerEngineConfig)  # the event loop must not wait for a service
        self._writer = CheckpointWriter(
            self._checkpoints, background=run.config.checkpoint.background or is_remote, on_saved=self._on_saved
        )
        self._pending: dict[str, float] | None = None
        self._diagnosis: RunDiagnosis | None = None
        self._tracer: EpisodeTracer | None = None
        self._threads = DaemonThreads("agentrl-trainer")
        self._cores = divide_cores(run.config.trainer.cpus, run.config.trainer.processes)[0]
        self._stop = asyncio.Event()
        self._failure: TrainingError | None = None
        self._lost: ServersLost | None = None

    def stop(self) -> None:
        """Request a stop with a checkpoint; an operation that cannot be interrupted is finished first."""
        self._stop.set()  # first, because writing the message to the log may fail
        self.say("stopping; interrupt again to stop immediately, and resume from the newest checkpoint")

    def fail(self, error: TrainingError) -> None:
        """Request a stop with this error and without a checkpoint; an uninterruptible operation is finished first."""
        self._failure = error
        self._stop.set()

    async def run(self) -> RunResult:
        """Train until the last step or a requested stop.

        Raises:
            UsageError: the user must change something: a missing model, a full disk.
            TrainingError: numbers are not finite, a weight sync failed, there is nothing to train on, or a rank died.
            ResumableError: a budget is spent, or all inference servers are lost; a checkpoint is saved.
        """
        with self._running(), self.interruption.stops(self.stop):
            async with AsyncExitStack() as stack:
                stack.push(self._report_problems)
                interrupted = await self._prepare_and_train(stack)
                self._status_writer.is_interrupted = interrupted
            return self._result(interrupted=interrupted)

    def _report_problems(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report and save the worst problems of the run, even after an error."""
        if self._diagnosis is not None:
            self._problems = report_problems(self.folder, self._diagnosis, self.say, error)

    async def _prepare_and_train(self, stack: AsyncExitStack) -> bool:
        """Run to the last step; return True if a stop request ended the run earlier."""
        try:
            await self._unless_stopped(self._prepare(stack))
        except _Interrupted:
            return True
        stack.enter_context(settled_heap(self._waits))
        return await self._train()

    async def _prepare(self, stack: AsyncExitStack) -> None:
        """Build the parts, from the newest checkpoint if there is one, and open the files."""
        self.enter(Phase.PREPARE)
        self._watch_stalls(stack)
        check_extra_rollouts(self.config)
        progress = self._resume(Progress)
        for warning in (*(rate_warnings(self.config) if progress is None else ()), *core_warnings(self.config)):
            self.say(warning)
        base_path = await prepare_model(self.config, self.folder.model, say=self.say, waits=self._waits)
        finished = self._read_finished_episodes()
        if not is_live(self.config):  # clients do not play their sessions again, so their records stay
            void_after(self.folder.trajectories, self.step + 1, 0 if progress is None else progress.store_position)
        self._store = stack.enter_context(TrajectoryStore(self.folder.trajectories, step=self.step + 1))
        self._tables = TokenTables(self.folder.path, self.config.observe.tokens, step=self.step, say=self.say)
        model_path = base_path if self._saved is None else str(self._saved.path / MODEL)
        version = 0 if progress is None else progress.version
        with self._waits.on(WaitKind.COLLECTIVE, "run", "the start of ranks and servers"):
            processes = await stack.enter_async_context(
                open_processes(
                    self.config,
                    self.folder,
                    model_path=model_path,
                    base_path=base_path,
                    version=version,
                    say=self.say,
                    on_loss=self._loss_callback(),
                )
            )
        observer, journals = self._open_observer(stack)
        with self._waits.on(WaitKind.TRAINER, "run", "the model and the environments"):
            self._parts = build_training(
                self.config,
                processes,
                model_path=model_path,
                base_path=base_path,
                version=version,
                observer=observer,
                waits=self._waits,
                folder=self.folder.path,
                journals=journals,
                settings=self._settings,
                say=self.say,
            )
        stack.push_async_exit(self._close_parts)
        self._status_writer.engines["engine"] = self._parts.engine
        if self._parts.evaluation is not None:
            self._status_writer.engines["evaluation"] = self._parts.evaluation.engine
        self._evaluations = PeriodicEvaluations(self._parts, self.config, name=self.folder.path.name)
        stack.push_async_callback(self._evaluations.close)
        self._parts.trainer.write_dumps(self.folder.numerics, self.config.model_dump(mode="json"))
        await self._restore(progress, finished, journals)
        self._open_metrics(stack, 0 if progress is None else progress.metrics_position)
        self._diagnosis = open_diagnosis(self.folder, self.config, self._parts)
        self._last = self._diagnosis.run.newest_metrics  # the result if no step is left
        with self._waits.on(WaitKind.SYNC, "trainer", "the engine's start and the check of its weights"):
            await self._parts.start()
            if progress is not None and progress.evaluating is not None:
                await self._repeat_evaluation(progress.evaluating)
        self._status_writer.live = lambda: self._parts.scheduler.live
        if (traffic := self._parts.scheduler.live) is not None:
            self.say(f"serving {traffic.url}/s/NAME/v1 (OpenAI) and {traffic.url}/s/NAME (Anthropic)")
        self._save_changes()

    async def _restore(
        self, progress: Progress | None, finished: RecoveredEpisodes, journals: JournalFolder | None
    ) -> None:
        """Restore the parts from the newest checkpoint, and use the episodes that a killed run finished after it."""
        if self._saved is not None and progress is not None:
            await self._parts.scheduler.fetch_saved(progress.scheduler)
            restore(self._saved, self._parts, progress)
            self._pending = None if progress.pending is None else dict(progress.pending)
        live = is_live(self.config)
        if (journals is not None or live) and (recovered := self._parts.scheduler.recover(finished, journals)):
            self.say(f"kept {recovered} {'rewarded sessions' if live else 'finished episodes'} not yet trained on")

    def _open_observer(self, stack: AsyncExitStack) -> tuple[RolloutObserver, JournalFolder | None]:
        """Open the records of the episodes: their observer, and the journals of an asynchronous run."""
        seen = (self._store, self.status, self._watcher, self._waits, self._tables.drop)
        recorder, journals = EpisodeRecorder(*seen), None
        if not self.config.rollout.is_synchronous and not is_live(self.config):
            journals = stack.enter_context(JournalFolder(self.folder.inflight, self._waits.clock, self.say))
            recorder = JournalingRecorder(*seen, journals=journals)
        if not traces_episodes(self.config.trackers):
            return recorder, journals
        self._tracer = EpisodeTracer(recorder, self._waits, self.status, self._trace)
        return self._tracer, journals

    async def _repeat_evaluation(self, step: int) -> None:
        """Restart the unfinished evaluation of a checkpoint, if the checkpoint has the weights that it measures."""
        if step == self.step and self._parts.evaluation is not None:
            await self._evaluations.start(step)
            return
        reason = "its weights are not stored" if step != self.step else "evaluation.engine is no longer set"
        self.say(f"the evaluation of step {step} did not finish, and is not repeated: {reason}")

    def _read_finished_episodes(self) -> RecoveredEpisodes:
        """Read the episodes that a killed run finished after its checkpoint; none for synchronous runs.

        A synchronous run plays them again, with the same seeds and weights, and so resumes exactly.
        """
        rollout = self.config.rollout
        if rollout.is_synchronous:
            return RecoveredEpisodes()
        first_step, live = self.step - rollout.max_staleness, is_live(self.config)
        if live:
            first_step = first_step_to_read(self.folder.path, self.step, rollout.max_staleness)
        return read_recoverable(self.folder.trajectories, first_step=first_step, are_stored=live)

    async def _close_parts(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the parts, the trackers and the token tables; a stop request shortens their time."""
        await self._parts.scheduler.close()
        await close_together(
            self._stop,
            self._parts.close(),
            close_in_thread(self._stop, self._tables.close, "writing the token tables"),
            close_in_thread(self._stop, lambda seconds: self._close_trackers(error, seconds), "closing the trackers"),
        )

    def _loss_callback(self) -> Callable[[TrainingError], None]:
        """Return a thread-safe function that ends the run when a required process is lost."""
        loop = asyncio.get_running_loop()

        def report_loss(error: TrainingError) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(self.fail, error)

        return report_loss

    async def _train(self) -> bool:
        """Run all remaining steps; return True if a stop request ended the run earlier."""
        try:
            interrupted = await self._train_steps()
            with self._waits.on(WaitKind.DISK, "run", "the last checkpoint"):
                self._writer.wait()
            return interrupted
        finally:
            self._writer.close()

    async def _train_steps(self) -> bool:
        try:
            if self._pending is not None:
                await self._finish_step()
            while self.step < self.config.trainer.steps:
                self._raise_if_stopped()
                self._writer.poll()
                await self._run_step()
        except (_Interrupted, ResumableError) as end:
            await self._parts.scheduler.close()
            self._save()
            if isinstance(end, ResumableError):
                self._writer.wait()
                raise
            return True
        await self._parts.scheduler.close()
        self._parts.scheduler.record_left_over()
        return False

    async def _run_step(self) -> None:
        parts, clock = self._parts, StepClock(self._parts, price_per_hour=self.config.run.price_per_hour)
        self.enter(Phase.ROLLOUT)
        groups = await self._unless_stopped(parts.scheduler.next_batch())
        clock.phase_ended("rollout")
        self.enter(Phase.TRAIN)
        with self._waits.on(WaitKind.SYNC, "trainer", "servers to release memory"):
            released = await self._release_memory()
        report = await self._update(groups)
        clock.phase_ended("train")
        self.enter(Phase.SYNC)
        synced = await self._sync_weights(self.step + 1) if released else None
        clock.phase_ended("sync")
        self.step += 1
        self._pending = clock.metrics(groups, report, synced, version=self.step) | self._settings.metrics()
        self._settings.observe(self._pending)
        self._settings.advance(self.step)
        parts.scheduler.set_version(self.step)
        self._tables.write(self.step, groups, report, adapters=parts.trainer.sampled_versions)
        with self._waits.on(WaitKind.DISK, "run", "the trajectory store"):
            for group in groups:
                parts.scheduler.record_end(group, GroupEnd.TRAINED)
            self._store.rotate(self.step + 1)
        if synced is None:
            raise self._lost or _Interrupted
        if not self.config.rollout.is_synchronous:
            parts.scheduler.start_episodes()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        assert self._diagnosis is not None
        for warning in self._diagnosis.add_step(self.step, self._pending, trajectories, report.warnings):
            self.say(f"step {self.step}: {warning}")
        with self._waits.on(WaitKind.DISK, "run", "incidents.json"):
            save_failures(self.folder, self._diagnosis)
        await self._finish_step()

    async def _release_memory(self) -> bool:
        """Let servers release memory, if configured; return False if a stop was requested and some did not answer."""
        try:
            with self._waits.on(WaitKind.SYNC, "trainer", "servers that release memory"):
                await self._unless_stopped(self._parts.sync.release_memory(), grace_s=SYNC_GRACE_S)
        except _Interrupted:
            return False
        return True

    async def _sync_weights(self, version: int) -> SyncReport | None:
        """Send the new weights to the engine.

        ``None`` if a stop was requested and the sync did not finish in time, or if all servers are lost. The step
        counts in all cases, because a resumed run begins with a sync.
        """
        try:
            with self._waits.on(WaitKind.SYNC, "trainer", "the weight sync"):
                return await self._unless_stopped(self._parts.sync.sync(version), grace_s=SYNC_GRACE_S)
        except _Interrupted:
            return None
        except ServersLost as lost:
            self._lost = lost
            return None

    async def _update(self, groups: Sequence[Group]) -> StepReport:
        """Run one trainer step: in a thread next to episodes and server checks, unless `idle_while_training`."""
        trainer = self._parts.trainer
        settings = self._settings.config
        with self._waits.on(WaitKind.EXTRAS, "trainer", "extra rollouts and a served teacher"):
            extras = await self._parts.extras.for_step(groups)

        def step() -> StepReport:
            if self._settings.changes:
                trainer.configure(settings)
            return trainer.step(
                [trajectory for group in groups for trajectory in group.trajectories],
                temperature=settings.sampling.temperature,
                extras=extras,
            )

        kind = WaitKind.TRAINER if self.config.trainer.processes == 1 else WaitKind.COLLECTIVE
        with self._waits.on(kind, f"step {self.step + 1}", "trainer.step"):
            if self._parts.idle_while_training:
                return step()
            on_cores = functools.partial(compute_on, self._cores, step)
            return await call_in_thread(self._threads, on_cores, "the training step")

    async def _finish_step(self) -> None:
        """Evaluate if due, write the step's metrics, and save a checkpoint if due."""
        collect_settled_heap()
        if self._pending is None:
            return
        last = self.step == self.config.trainer.steps
        if self._evaluations.waits_after(self.step):
            self.enter(Phase.EVALUATE)
        if found := await self._unless_stopped(self._evaluations.after_step(self.step)):
            self._pending |= found
            self._watcher.on_evaluation(int(found.get(AT_STEP, self.step)), found)
        self._write_metrics(self._pending)
        self._pending = None
        if last or self.step % self.config.checkpoint.every == 0:
            self._save()

    def _write_metrics(self, metrics: dict[str, float]) -> None:
        if self._tracer is not None:
            self._tracer.end_step(self.step)
        self._record_step(self.step, metrics)
        self._last = metrics

    def _save(self) -> None:
        self.enter(Phase.CHECKPOINT)
        with self._waits.on(WaitKind.DISK, "run", f"the checkpoint of step {self.step}"):
            self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        self._metrics.sync()
        self._store.sync()
        progress = Progress(
            step=self.step,
            version=self.step,
            metrics_position=self._metrics.position,
            store_position=self._store.position,
            pending=self._pending,
            evaluating=self._evaluations.running,
            settings=self._settings.state_dict(),
            scheduler=self._parts.scheduler.state_dict(),
        )
        if self._writer.background:
            self._writer.wait()  # so that only one copy is in memory
            write = copy_checkpoint(self._parts, progress)
        else:
            write = functools.partial(write_checkpoint, parts=self._parts, progress=progress)
        self._writer.save(self.step, write)

    def _on_saved(self, checkpoint: Checkpoint) -> None:
        self._saved = checkpoint
        self._watcher.on_checkpoint(checkpoint.step, checkpoint.path)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T], *, grace_s: float = 0.0) -> T:
        """Return the result of `work`; a stop request cancels it after the grace period."""
        task = asyncio.create_task(work, name=f"the phase {self.status.phase}")
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and grace_s:
                await asyncio.wait({task}, timeout=grace_s)
        finally:
            stop.cancel()
            if not task.done():
                await cancel_or_abandon(task, PHASE_GRACE_S)
        if task.cancelled() or not task.done():
            if not self._stop.is_set():
                raise TrainingError("a part of the run was cancelled, although no stop was requested")
            raise self._failure or _Interrupted
        return task.result()

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise self._failure or _Interrupted


def train(run: Run, *, watcher: RunWatcher | None = None, interruption: StopRequest | None = None) -> RunResult:
    """Train a run, on new or on stored episodes; the calling thread must not have a running event loop.

    Ctrl-C and SIGTERM stop the run with a checkpoint; a second signal stops it within seconds, even if code hangs.
    After the loss of a rank, the run restarts from its newest checkpoint, up to ``trainer.restarts`` times.

    Args:
        run: Folder and config.
        watcher: Receives the progress.
        interruption: Stops the run from another thread; signals only reach the main thread.

    Raises:
        UsageError: the user must change something.
        TrainingError: training cannot continue.
    """
    interruption, watcher = interruption or StopRequest(), watcher or RunWatcher()
    if (finished := finished_result(run, watcher)) is not None:
        return finished
    kind = Orchestrator if run.config.trainer.episodes is None else StoredTraining
    return run_with_restarts(
        run,
        lambda run, reason: kind(run, watcher=watcher, reason=reason, interruption=interruption),
        lambda loop: _run_loop(loop, interruption),
        interruption,
    )


def _run_loop(loop: Orchestrator | StoredTraining, interruption: StopRequest) -> RunResult:
    try:
        return run_until_stopped(loop.run(), interruption)
    except SystemExit as error:
        raise TrainingError(
            "an environment, tool or agent loop exited the program from a task that it had started",
            got=described_error(error),
            hint="set environment.isolation=process, or remove the call of sys.exit()",
        ) from error
