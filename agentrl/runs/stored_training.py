"""Training on stored episodes: the trainer without an engine and without environments.

    StoredGroups ─► trainer.step ─► metrics ─► [checkpoint]

The batches, losses and metrics are those of a run that plays the same groups. Trained with the config of the
synchronous run that played them, from the same initial model, they give its updates bit for bit. Otherwise the episodes
are off-policy, which the algorithm corrects with their stored log-probabilities, as in asynchronous training.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from agentrl.builders.group_extras import learning_signal
from agentrl.builders.models import load_images, prepare_model, start_renderer
from agentrl.builders.trainers import TrainerParts, build_on_ranks, build_trainer
from agentrl.config.config import Config
from agentrl.config.load import dump_config
from agentrl.config.resume_rules import rule_of
from agentrl.config.usual_learning_rate import rate_warnings
from agentrl.errors import TrainingError, UsageError
from agentrl.errors.foreign import CLOSING_S, DaemonThreads, call_in_thread, run_in_own_thread
from agentrl.observe.checkpoints import Checkpoint, Checkpoints
from agentrl.observe.diagnosis import RunDiagnosis, save_problems
from agentrl.observe.incidents import Incidents
from agentrl.observe.metrics import TIMING_PREFIX, MetricsFile, Trackers, read_metrics
from agentrl.observe.model_folder import MODEL, find_model
from agentrl.observe.problems import Problem, problem_lines
from agentrl.observe.progress import Phase, RunStatus, RunWatcher
from agentrl.observe.run_folder import logging_to
from agentrl.render.tokenizers import load_tokenizer, pad_id
from agentrl.rollout.groups import Group
from agentrl.runs.record import group_metrics
from agentrl.runs.start import Run, RunResult, StartCheck, check_rollouts
from agentrl.runs.status_writer import StatusWriter
from agentrl.runs.stored_groups import StoredGroups, check_stored_training
from agentrl.runs.token_tables import TokenTables
from agentrl.training.algorithm_functions import learns_from_rewards
from agentrl.training.distributed.launch import open_ranks

_log = logging.getLogger(__name__)
_THREAD = DaemonThreads("agentrl-trainer")
_PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Progress:
    """Progress of a run in a checkpoint."""

    step: int
    groups_used: int
    """Number of stored groups that the steps have used, including those that dynamic sampling has dropped."""
    metrics_position: int
    """Size in bytes of ``metrics.jsonl`` after these steps."""


def check_stored_start(config: Config, *, fetch: bool = True, say: Callable[[str], None] = lambda _: None) -> None:
    """Check the stored episodes of a run before its folder is created; see `StartCheck`."""
    check_stored_training(config)
    groups = StoredGroups(config)
    try:
        groups.check_enough()
        if start_renderer(config, fetch=fetch) is not None:
            groups.check_model(find_model(config.model.path))
    finally:
        groups.close()


def start_check(config: Config) -> StartCheck:
    """Return the check of a training run before its folder is created."""
    return check_rollouts if config.trainer.episodes is None else check_stored_start


class StoredTraining:
    """Run that trains on stored episodes until its last step or a requested stop.

    Args:
        run: Folder and config; the run resumes from the newest checkpoint in the folder.
        watcher: Receives the progress.
    """

    def __init__(self, run: Run, *, watcher: RunWatcher | None = None) -> None:
        self.config, self.folder = run.config, run.folder
        self.status = RunStatus(steps=run.config.trainer.steps)
        self.step = 0
        self._changes = run.changes
        self._watcher = watcher or RunWatcher()
        self._status_writer = StatusWriter(run.folder.path, self.status)
        self._checkpoints = Checkpoints(run.folder.checkpoints, keep=run.config.checkpoint.keep)
        self._saved: Checkpoint | None = None
        self._used = 0
        self._last: Mapping[str, float] = {}
        self._problems: tuple[Problem, ...] = ()
        self._stopped = False
        self._failure: TrainingError | UsageError | None = None

    def stop(self) -> None:
        """Request a stop with a checkpoint after the current step."""
        self._stopped = True
        self._say("stopping after this step; interrupt again to stop immediately")

    async def run(self) -> RunResult:
        """Train until the last step or a requested stop.

        Raises:
            UsageError: the user must change something: a missing model, unsuitable episodes, a full disk.
            TrainingError: numbers are not finite, or a rank died.
        """
        with (
            self.folder.in_use(),
            logging_to(self.folder.run_log, self._watcher.on_message),
            self._status_writer,
        ):
            self._watcher.on_start(self.folder.path, self.status)
            for change in self._changes:
                self._say(f"changed: {change} ({rule_of(change.key).why})")
            async with AsyncExitStack() as stack:
                await self._prepare(stack)
                await self._train()
                self._diagnose()
                self._status_writer.is_interrupted = self.step < self.config.trainer.steps
            return RunResult(
                folder=self.folder.path,
                step=self.step,
                checkpoint="" if self._saved is None else str(self._saved.path),
                metrics=self._last,
                interrupted=self.step < self.config.trainer.steps,
                problems=self._problems,
            )

    async def _prepare(self, stack: AsyncExitStack) -> None:
        self._enter(Phase.PREPARE)
        config = self.config
        check_stored_training(config)
        self._saved = self._checkpoints.newest()
        progress = None if self._saved is None else _read_progress(self._saved)
        for warning in rate_warnings(config) if progress is None else ():
            self._say(warning)
        if config.evaluation.every:
            self._say("evaluation.every is not used: without an engine, no episode is played")
        start = await prepare_model(config, self.folder.model, say=self._say)
        model_path = start if self._saved is None else str(self._saved.path / MODEL)
        self._groups = StoredGroups(config)
        stack.callback(self._groups.close)
        self._groups.check_model(start)
        self._groups.check_enough(0 if progress is None else progress.groups_used)
        self._say(self._groups.summary)
        ranks = stack.enter_context(
            open_ranks(config.trainer.processes, logs=self.folder.logs, on_loss=self._loss_callback())
        )
        self._parts: TrainerParts = build_on_ranks(ranks, build_trainer, config, model_path, start)
        self._tokenizer, self._images = load_tokenizer(model_path), load_images(model_path)
        self._parts.trainer.write_dumps(self.folder.numerics, config.model_dump(mode="json"))
        if self._saved is not None and progress is not None:
            self._parts.trainer.checkpoint.load(self._saved.path)
            self.step, self._used = progress.step, progress.groups_used
        self._has_signal = learning_signal(config)
        self._open_metrics(stack, 0 if progress is None else progress.metrics_position)
        self._tables = TokenTables(self.folder.path, config.observe.tokens, step=self.step, say=self._say)
        stack.push_async_callback(run_in_own_thread, self._tables.close, within_s=CLOSING_S)
        self._diagnosis = RunDiagnosis(
            Incidents(),
            {},
            read_metrics(self.folder.metrics_file),
            learns_from_rewards=learns_from_rewards(config.algorithm),
        )
        if self._changes:
            self.folder.save_config(dump_config(config))

    def _loss_callback(self) -> Callable[[TrainingError], None]:
        """Return a function that ends the run before its next step when a rank is lost."""

        def report_loss(error: TrainingError) -> None:
            self._failure, self._stopped = error, True

        return report_loss

    def _open_metrics(self, stack: AsyncExitStack, position: int) -> None:
        self._metrics = MetricsFile(self.folder.metrics_file)
        self._metrics.truncate(position)
        stack.callback(self._metrics.close)
        values = self.config.model_dump(mode="json")
        self._trackers = Trackers(
            self.config.trackers, folder=self.folder.logs, name=self.folder.path.name, config=values
        )
        stack.push_async_callback(run_in_own_thread, self._trackers.close)

    async def _train(self) -> None:
        dynamic, every = self.config.algorithm.dynamic_sampling, self.config.checkpoint.every
        batches = self._groups.batches(self._used, keep=self._has_signal if dynamic else lambda group: True)
        while self.step < self.config.trainer.steps:
            await asyncio.sleep(0)  # in which a request to stop arrives
            if self._stopped:
                break
            if (found := next(batches, None)) is None:
                self._failure = self._used_up()
                break
            groups, used = found
            await self._run_step(groups)
            self._used = used
            if self.step == self.config.trainer.steps or self.step % every == 0:
                self._save()
        is_saved = self._saved is not None and self._saved.step == self.step
        if self.step and not is_saved and not isinstance(self._failure, TrainingError):
            self._save()
        if self._failure is not None:
            raise self._failure

    def _used_up(self) -> UsageError:
        return UsageError(
            f"the stored episodes are used up after step {self.step}",
            got=self._groups.summary,
            expected=f"groups with a learning signal for {self.config.trainer.steps} steps",
            hint="set algorithm.dynamic_sampling=false to use the other groups, too, or play more episodes",
        )

    async def _run_step(self, groups: Sequence[Group]) -> None:
        began = time.perf_counter()
        self._enter(Phase.TRAIN)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        step = functools.partial(
            self._parts.trainer.step,
            trajectories,
            temperature=self.config.sampling.temperature,
            pad_id=pad_id(self._tokenizer),
        )
        report = await call_in_thread(_THREAD, step, "the training step")
        seconds = time.perf_counter() - began
        sampled = sum(trajectory.sampled_tokens for trajectory in trajectories)
        metrics = {
            **group_metrics(groups, report, version=self.step, has_signal=self._has_signal),
            "version": self.step + 1,
            f"{TIMING_PREFIX}train_s": seconds,
            f"{TIMING_PREFIX}step_s": seconds,
            f"{TIMING_PREFIX}tokens_per_s": sampled / seconds,
        }
        self.step += 1
        self._tables.write(self.step, groups, report)
        self._metrics.append_step(self.step, metrics)
        self._trackers.log(self.step, metrics)
        self._last = self.status.metrics = metrics
        self.status.step = self.step
        self._watcher.on_step(self.step, metrics)
        for warning in (*report.warnings, *self._diagnosis.add_step(self.step, metrics, trajectories)):
            self._say(f"step {self.step}: {warning}")

    def _save(self) -> None:
        self._enter(Phase.CHECKPOINT)
        self._metrics.sync()
        progress = _Progress(step=self.step, groups_used=self._used, metrics_position=self._metrics.position)

        def write(folder: Path) -> None:
            self._parts.source.save(folder / MODEL, self._tokenizer, self._images)
            self._parts.trainer.checkpoint.save(folder)
            (folder / _PROGRESS).write_bytes(orjson.dumps(asdict(progress)))

        self._saved = self._checkpoints.save(self.step, write)
        self._watcher.on_checkpoint(self.step, self._saved.path)

    def _diagnose(self) -> None:
        self._problems = self._diagnosis.problems()
        for line in problem_lines(self._problems):
            self._say(line)
        with suppress(UsageError):  # a full disk
            save_problems(self.folder, self._problems)

    def _enter(self, phase: Phase) -> None:
        self.status.phase = phase
        self._watcher.on_status(self.status)

    def _say(self, text: str) -> None:
        _log.warning("%s", text)
        self._watcher.on_message(text)


def _read_progress(checkpoint: Checkpoint) -> _Progress:
    """Read a checkpoint's progress.

    Raises:
        UsageError: the checkpoint is not that of a run on stored episodes.
    """
    file = checkpoint.path / _PROGRESS
    record = orjson.loads(file.read_bytes()) if file.is_file() else {}
    if record.keys() != {"step", "groups_used", "metrics_position"}:
        raise UsageError(f"checkpoint {checkpoint.path} is not that of a run on stored episodes")
    return _Progress(**record)
