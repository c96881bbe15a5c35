"""Training on stored episodes: the trainer without an engine and without environments.

    StoredGroups ─► trainer.step ─► metrics ─► [checkpoint]

The batches, losses and metrics are those of a run that plays the same groups. Trained with the config of the
synchronous run that played them, from the same initial model, they give its updates bit for bit. Otherwise the episodes
are off-policy, which the algorithm corrects with their stored log-probabilities, as in asynchronous training.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from agentrl.builders.adapter_checks import refuse_role_adapters
from agentrl.builders.group_extras import learning_signal, policy_group_size, worth_training
from agentrl.builders.models import check_tokens, load_images, prepare_model, start_renderer
from agentrl.builders.trainers import TrainerParts, build_on_ranks, build_trainer
from agentrl.config.config import Config
from agentrl.config.derived import per_environment_configs
from agentrl.config.step_settings import STAGE_MARK
from agentrl.config.usual_learning_rate import rate_warnings
from agentrl.errors import ConfigError, Outcome, TrainingError, UsageError
from agentrl.errors.deadlines import CLOSING_S
from agentrl.errors.foreign import DaemonThreads, call_in_thread, run_in_own_thread
from agentrl.evaluation.diagnosis.summary import RunSummary
from agentrl.evaluation.diagnosis.watch import RunDiagnosis
from agentrl.models.load import embedding_rows
from agentrl.observe.metrics import TIMING_PREFIX, read_metrics
from agentrl.observe.model_folder import MODEL, find_model
from agentrl.observe.progress import Phase
from agentrl.observe.trajectory_index import EpisodeFilter, EpisodeRow, TrajectoryIndex
from agentrl.render.tokenizers import load_tokenizer
from agentrl.rollout.finished_episodes import group_position
from agentrl.rollout.groups import Group
from agentrl.rollout.task_order import SampledTask
from agentrl.runs.checkpoint import StepProgress, write_progress
from agentrl.runs.diagnosis import report_problems
from agentrl.runs.loop import TrainingLoop
from agentrl.runs.record import group_metrics
from agentrl.runs.start import RunResult, StartCheck, check_rollouts
from agentrl.runs.token_tables import TokenTables
from agentrl.task import Task
from agentrl.training.algorithm_functions import run_learns_from_rewards
from agentrl.training.distributed.launch import open_ranks
from agentrl.training.gradients import Objective
from agentrl.training.signals.without_model import needs_greedy_rollouts
from agentrl.training.stored_episodes import check_store_tokens, find_store

_THREAD = DaemonThreads("agentrl-trainer")


def check_stored_training(config: Config) -> None:
    """Check that the algorithm can train on stored episodes of the policy alone.

    Raises:
        ConfigError: it needs other rollouts, a served teacher, several adapters, or a cluster.
    """
    refuse_role_adapters(config, "training on stored episodes")
    teacher = config.algorithm.teacher
    needs = {
        "greedy rollouts": needs_greedy_rollouts(config.algorithm),
        "algorithm.expert": config.algorithm.expert is not None,
        "algorithm.teacher.servers": teacher is not None and bool(teacher.servers),
        "algorithm.teacher.hint": teacher is not None and teacher.hint is not None,
        "cluster": config.cluster is not None,
        "curriculum": config.curriculum.horizon is not None or config.curriculum.pools is not None,
    }
    if found := [name for name, is_needed in needs.items() if is_needed]:
        raise ConfigError(
            "this config cannot train on stored episodes",
            got=", ".join(found),
            expected="an algorithm that needs only the policy's episodes, on this machine",
            hint="remove trainer.episodes to play new episodes",
        )


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """Rows of a complete group, one for each member, in their order."""

    position: int
    id: str
    rows: Sequence[EpisodeRow]


class StoredGroups:
    """Complete groups of a trajectory store; their episodes are read when they are needed.

    Args:
        config: Config of the run, with ``trainer.episodes``.

    Raises:
        UsageError: the store does not exist, or its episodes have no tokens or no log-probabilities.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.store = find_store(Path(config.trainer.episodes or ""))
        self.size = policy_group_size(config.algorithm)
        self.incomplete = self.failed = 0
        """Numbers of skipped groups: incomplete ones, and those with too few trainable members."""
        self._index = TrajectoryIndex(self.store)
        try:
            self._check_logprobs()
            self.groups = self._find()
        except UsageError:
            self.close()
            raise

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def summary(self) -> str:
        """Counts of the groups, in words."""
        left_out = [
            f"{count} {words}"
            for count, words in (
                (self.incomplete, "incomplete groups are left out"),
                (self.failed, "groups with too few episodes to train on are left out"),
            )
            if count
        ]
        return "; ".join([f"{len(self)} stored groups of {self.size} episodes from {self.store}", *left_out])

    def check_enough(self, used: int = 0) -> None:
        """Check that the groups are enough for ``trainer.steps``, without those that dynamic sampling drops.

        Args:
            used: Number of groups that the earlier steps of the run have used.

        Raises:
            UsageError: there are too few.
        """
        trainer = self._config.trainer
        if used or len(self) >= trainer.steps * trainer.tasks_per_step:
            return
        enough = len(self) // trainer.tasks_per_step
        raise UsageError(
            "the stored episodes are too few for the run",
            got=self.summary,
            expected=f"{trainer.steps * trainer.tasks_per_step} groups for {trainer.steps} steps of "
            f"trainer.tasks_per_step={trainer.tasks_per_step}",
            hint=f"set trainer.steps={enough}" if enough else "play more: agentrl rollout --resume RUN",
        )

    def check_model(self, model_path: str) -> None:
        """Check that a model has the tokens of the episodes.

        Raises:
            ConfigError: the model has another tokenizer, or fewer token ids.
        """
        check_store_tokens(self.store, model_path)
        size = embedding_rows(model_path)
        unknown = [row for group in self.groups for row in group.rows if row.largest_id >= size]
        if unknown:
            raise ConfigError(
                f"the stored episodes are not those of a model such as {model_path}",
                got=f"token ids up to {max(row.largest_id for row in unknown)} in {len(unknown)} episodes",
                expected=f"ids below {size}",
                hint="train the model that sampled them, or one with the same vocabulary",
            )

    def read(self, group: CompleteGroup) -> Group:
        """Read the episodes of a group.

        Raises:
            UsageError: the store has changed.
        """
        members = {number: self._index.read(row).trajectory for number, row in enumerate(group.rows)}
        task = Task(id=group.rows[0].task_id, environment=group.rows[0].environment)
        draw = SampledTask(environment=self._label(group), place=group.position, task=task)
        return Group(position=group.position, draw=draw, size=self.size, members=members)

    def batches(self, used: int, *, keep: Callable[[Group], bool]) -> Iterator[tuple[list[Group], int]]:
        """Yield batches of ``trainer.tasks_per_step`` groups, each with the number of groups used until its end.

        Args:
            used: Number of groups that earlier steps have used.
            keep: Returns True if a group is worth training on; others are passed over.
        """
        batch: list[Group] = []
        for number, stored in enumerate(self.groups[used:], used + 1):
            group = self.read(stored)
            if keep(group):
                batch.append(group)
            if len(batch) == self._config.trainer.tasks_per_step:
                yield batch, number
                batch = []

    def _check_logprobs(self) -> None:
        rows = self._index.select(EpisodeFilter(is_trainable=True))
        without = sum(row.missing_logprobs > 0 or row.sampled_tokens == 0 for row in rows)
        if without:
            raise UsageError(
                f"episodes in {self.store} have no log-probabilities of the policy that played them",
                got=f"{without} of {len(rows)} episodes",
                expected="episodes that a local, vLLM or SGLang engine sampled, as in runs of agentrl train or rollout",
                hint="to train on demonstrations or texts, use agentrl sft",
            )

    def _find(self) -> list[CompleteGroup]:
        """Return the complete groups with enough trainable episodes, in the order of their positions."""
        latest: dict[str, dict[int, EpisodeRow]] = {}
        for row in self._index.select():
            members = latest.setdefault(row.group_id, {})
            earlier = members.get(row.member or 0)
            if row.outcome is not Outcome.CANCELLED and (earlier is None or row.attempt >= earlier.attempt):
                members[row.member or 0] = row
        largest = max((member for members in latest.values() for member in members), default=0)
        if largest >= self.size:
            raise ConfigError(
                "algorithm.group_size differs from that of the stored groups",
                got=self.size,
                expected=largest + 1,
                hint=f"set algorithm.group_size={largest + 1}",
            )
        found, least = [], 2 if Objective(self._config.algorithm).compares_groups else 1
        for place, (name, members) in enumerate(latest.items()):
            rows = [members[member] for member in sorted(members)]
            if len(rows) < self.size:
                self.incomplete += 1
            elif sum(row.is_trainable for row in rows) < least:
                self.failed += 1
            else:
                position = group_position(name)
                found.append(CompleteGroup(position if position >= 0 else len(latest) + place, name, rows))
        return sorted(found, key=lambda group: group.position)

    def _label(self, group: CompleteGroup) -> str:
        """Return the label of a group's environment, in a config with several environments."""
        rest = group.id.partition("-")[2]
        starts = {label: (f"{label}-", f"{label}{STAGE_MARK}") for label in self._labels if label}
        return next((label for label, start in starts.items() if rest.startswith(start)), "")

    @cached_property
    def _labels(self) -> Mapping[str, str]:
        """Environments by label; longer labels first."""
        parts = {part.label: part.config.sole_environment.name for part in per_environment_configs(self._config)}
        return dict(sorted(parts.items(), key=lambda item: -len(item[0])))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProgress(StepProgress):
    """Progress of a run on stored episodes in a checkpoint."""

    groups_used: int
    """Number of stored groups that the steps have used, including those that dynamic sampling has dropped."""


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


class StoredTraining(TrainingLoop):
    """Run that trains on stored episodes until its last step or a requested stop."""

    _stopped = False
    _failure: TrainingError | UsageError | None = None

    def stop(self) -> None:
        """Request a stop with a checkpoint after the current step."""
        self._stopped = True
        self.say("stopping after this step; interrupt again to stop immediately")

    async def run(self) -> RunResult:
        """Train until the last step or a requested stop.

        Raises:
            UsageError: the user must change something: a missing model, unsuitable episodes, a full disk.
            TrainingError: numbers are not finite, or a rank died.
        """
        with self._running(), self.interruption.stops(self.stop):
            async with AsyncExitStack() as stack:
                await self._prepare(stack)
                await self._train()
                self._problems = report_problems(self.folder, self._diagnosis, self.say)
                self._status_writer.is_interrupted = self.step < self.config.trainer.steps
            return self._result(interrupted=self._status_writer.is_interrupted)

    async def _prepare(self, stack: AsyncExitStack) -> None:
        self.enter(Phase.PREPARE)
        config = self.config
        check_stored_training(config)
        progress = self._resume(StoredProgress)
        self._used = 0 if progress is None else progress.groups_used
        for warning in rate_warnings(config) if progress is None else ():
            self.say(warning)
        if config.evaluation.every:
            self.say("evaluation.every is not used: without an engine, no episode is played")
        start = await prepare_model(config, self.folder.model, say=self.say)
        model_path = start if self._saved is None else str(self._saved.path / MODEL)
        check_tokens(config, start)
        self._groups = StoredGroups(config)
        stack.callback(self._groups.close)
        self._groups.check_model(start)
        self._groups.check_enough(self._used)
        self.say(self._groups.summary)
        ranks = stack.enter_context(
            open_ranks(config.trainer.processes, logs=self.folder.logs, on_loss=self._loss_callback())
        )
        self._parts: TrainerParts = build_on_ranks(ranks, build_trainer, config, model_path, start)
        self._tokenizer, self._images = load_tokenizer(model_path), load_images(model_path)
        self._parts.trainer.write_dumps(self.folder.numerics, config.model_dump(mode="json"))
        if self._saved is not None:
            self._parts.trainer.checkpoint.load(self._saved.path)
        self._has_signal = learning_signal(self._settings)
        self._open_metrics(stack, 0 if progress is None else progress.metrics_position)
        stack.push_async_exit(self._close_trackers_in_thread)
        self._tables = TokenTables(self.folder.path, config.observe.tokens, step=self.step, say=self.say)
        stack.push_async_callback(run_in_own_thread, self._tables.close, within_s=CLOSING_S)
        summary = RunSummary(config=config, learns_from_rewards=run_learns_from_rewards(config))
        self._diagnosis = RunDiagnosis(summary, read_metrics(self.folder.metrics_file))
        self._last = summary.newest_metrics  # the result if no step is left
        self._save_changes()

    def _loss_callback(self) -> Callable[[TrainingError], None]:
        """Return a function that ends the run before its next step when a rank is lost."""

        def report_loss(error: TrainingError) -> None:
            self._failure, self._stopped = error, True

        return report_loss

    async def _train(self) -> None:
        every, keep = self.config.checkpoint.every, worth_training(self._settings, self._has_signal)
        batches = self._groups.batches(self._used, keep=keep or (lambda group: True))
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
        self.enter(Phase.TRAIN)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if self._settings.changes:
            self._parts.trainer.configure(self._settings.config)
        step = functools.partial(
            self._parts.trainer.step,
            trajectories,
            temperature=self.config.sampling.temperature,
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
            **self._settings.metrics(),
        }
        self.step += 1
        self._settings.observe(metrics)
        self._settings.advance(self.step)
        self._tables.write(self.step, groups, report)
        self._record_step(self.step, metrics)
        self._last = metrics
        for warning in self._diagnosis.add_step(self.step, metrics, trajectories, report.warnings):
            self.say(f"step {self.step}: {warning}")

    def _save(self) -> None:
        self.enter(Phase.CHECKPOINT)
        self._metrics.sync()
        progress = StoredProgress(
            step=self.step,
            groups_used=self._used,
            metrics_position=self._metrics.position,
            settings=self._settings.state_dict(),
        )

        def write(folder: Path) -> None:
            self._parts.source.save(folder / MODEL, self._tokenizer, self._images)
            self._parts.trainer.checkpoint.save(folder)
            write_progress(folder, progress)

        self._saved = self._checkpoints.save(self.step, write)
        self._watcher.on_checkpoint(self.step, self._saved.path)
