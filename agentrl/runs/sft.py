"""Warm start: the environment's expert demonstrates, and the model learns to do likewise. Driven by `agentrl sft`.

expert ─► episodes through the agent loop ─► ledger (forced tokens) ─► cross-entropy ─► checkpoints/step-N/model
                          or a file of conversations ──►┘

- Demonstrations: environments' experts play through the agent loop, into the ledger of the model to be taught.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from transformers import PreTrainedModel

from agentrl.builders.chat_file import lessons, read_chats
from agentrl.builders.episodes import (
    RunEnvironment,
    build_mixture,
    build_worlds,
    close_worlds,
)
from agentrl.builders.models import (
    build_renderer,
    load_tokenizer,
    pad_id,
    prepare_model,
)
from agentrl.builders.record import EpisodeRecorder, UpdateLog
from agentrl.builders.run import Run, RunResult
from agentrl.builders.trainers import BUILD_LEARNER, LearnerParts, build_learner
from agentrl.builders.training import check_rendering
from agentrl.config.config import Config
from agentrl.errors import UsageError
from agentrl.evaluation.periodic import success_now
from agentrl.image import ImageReader
from agentrl.models.load import load_model
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.metrics import TIMING_PREFIX
from agentrl.observe.model_folder import MODEL
from agentrl.observe.progress import Phase, RunStatus, RunWatcher
from agentrl.observe.run_folder import logging_to
from agentrl.observe.trajectory_store import TrajectoryStore
from agentrl.render.renderer import Renderer
from agentrl.rollout.runner import Assignment, play_all
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.rollout.turns import derive_seed
from agentrl.rollout.waits import RolloutObserver
from agentrl.task import Task
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.launch import open_ranks
from agentrl.training.sft import SFTProgress, train_supervised
from agentrl.training.weights import save_policy_folder
from agentrl.trajectory import Trajectory


async def collect_demonstrations(
    config: Config,
    renderer: Renderer,
    *,
    observer: RolloutObserver | None = None,
    on_episode: Callable[[Trajectory], None] = lambda _: None,
    on_stall: Callable[[str], None] = lambda _: None,
) -> list[Trajectory]:
    """Let experts play ``sft.episodes`` tasks of the training splits, as the agent would: several environments in the
    shares of their weights.

    Args:
        config: Environment, agent, and ``sft``.
        renderer: Of the model that will learn from them.
        observer: Is told of every turn.
        on_episode: Called after each episode.
        on_stall: Is told who waits for what when nothing has moved for ``rollout.stall_report_s``.

    Returns:
        Those that solved their task (all trainable ones where the environment does not tell), in the order of tasks.

    Raises:
        UsageError: an environment has no expert, or it solved nothing.
    """
    tasks = build_mixture(config)
    policy = ScriptedEpisodePolicy(
        ScriptedPolicy.EXPERT, renderer, max_context=config.agent.max_tokens, mistakes=config.sft.mistakes
    )
    worlds = build_worlds(config, policy, observer=observer)
    draws = [tasks.next() for _ in range(config.sft.episodes)]
    played: dict[int, Trajectory] = {}
    try:
        async with worlds[0].pool.waits.watched(config.rollout.stall_report_s, on_stall):
            for world in worlds:
                own = {
                    number: _assignment(draw.task, number, config.run.seed)
                    for number, draw in enumerate(draws)
                    if draw.environment == world.label
                }
                played |= await _played(world, own, on_episode)
    finally:
        await close_worlds(worlds)
    return [played[number] for number in sorted(played)]


async def _played(
    world: RunEnvironment, assignments: Mapping[int, Assignment], on_episode: Callable[[Trajectory], None]
) -> dict[int, Trajectory]:
    """What can be learnt from among the demonstrations of one environment, by number."""
    numbers = {assignment.group_id: number for number, assignment in assignments.items()}
    found: dict[int, Trajectory] = {}
    concurrency = world.config.rollout.max_concurrent
    async for trajectory in play_all(world.runner, assignments.values(), concurrency=concurrency):
        found[numbers[trajectory.group_id]] = trajectory
        on_episode(trajectory)
    return _worth_learning(found)


def _assignment(task: Task, number: int, seed: int) -> Assignment:
    group_id = f"demonstration-{number}"
    return Assignment(task=task, group_id=group_id, member=0, seed=derive_seed(seed, group_id))


def _worth_learning(played: Mapping[int, Trajectory]) -> dict[int, Trajectory]:
    good = {
        number: t
        for number, t in played.items()
        if t.outcome is not None and t.outcome.is_trainable and t.success is not False
    }
    if played and not good:
        last = played[max(played)]
        raise UsageError(
            f"no demonstration of {last.environment} can be learnt from",
            got=f"{len(played)} episodes, the last one {last.outcome}: {last.error or 'task not solved'}",
            expected="an expert that solves tasks within the agent's budgets",
        )
    return good


class WarmStart:
    """One warm start.

    Args:
        run: Folder and config.
        watcher: Is told how it goes.
    """

    def __init__(self, run: Run, *, watcher: RunWatcher | None = None) -> None:
        self.config = run.config
        self.folder = run.folder
        self.status = RunStatus()
        self._watcher = watcher or RunWatcher()
        self._log = UpdateLog(run, self.status, self._watcher)
        self._success: float | None = None
        """As measured last."""

    def run(self) -> RunResult:
        """Demonstrate, learn, save.

        Raises:
            UsageError: no expert, no model, a full disk.
            TrainingError: the loss is not finite.
        """
        with self.folder.in_use(), logging_to(self.folder.run_log, self._watcher.on_message):
            self._watcher.on_start(self.folder.path, self.status)
            path, demonstrations = asyncio.run(self._demonstrate())
            return self._learn(path, demonstrations)

    async def _demonstrate(self) -> tuple[str, list[Trajectory]]:
        """The model's folder, and the episodes to learn from."""
        self._enter(Phase.PREPARE)
        path = await prepare_model(self.config, self.folder, say=self._watcher.on_message)
        renderer = build_renderer(self.config, path, load_tokenizer(path))
        if self.config.sft.data is not None:
            return path, self._read(self.config.sft.data, renderer)
        check_rendering(self.config, renderer)
        self._enter(Phase.DEMONSTRATE)
        self.status.episodes_wanted = self.config.sft.episodes
        with TrajectoryStore(self.folder.trajectories, step=0) as store:
            recorder = EpisodeRecorder(store, self.status, self._watcher)
            return path, await collect_demonstrations(
                self.config, renderer, observer=recorder, on_stall=self._watcher.on_message
            )

    def _read(self, file: str, renderer: Renderer) -> list[Trajectory]:
        """The conversations of a file that fit."""
        found = lessons(read_chats(file), renderer, max_tokens=self.config.agent.max_tokens)
        if found.too_long:
            self._watcher.on_message(f"{found.too_long} conversations are longer than agent.max_tokens, and left out")
        return found.trajectories

    def _learn(self, path: str, demonstrations: list[Trajectory]) -> RunResult:
        tokenizer = load_tokenizer(path)
        renderer = build_renderer(self.config, path, tokenizer)
        self._enter(Phase.WARM_START)
        with ExitStack() as stack:
            stack.enter_context(self._log)
            ranks = stack.enter_context(open_ranks(self.config.trainer.processes, logs=self.folder.logs))
            parts = self._build(path, demonstrations, pad_id(tokenizer), renderer.images, ranks)
            enough = functools.partial(self._is_enough, parts, path, renderer)
            final = train_supervised(parts.learner, progress=self._record, enough=enough)
            self._say_how_it_ended()
            self._enter(Phase.CHECKPOINT)
            checkpoints = Checkpoints(self.folder.checkpoints, keep=self.config.checkpoint.keep)
            saved = checkpoints.save(
                final.update,
                lambda folder: save_policy_folder(parts.source, tokenizer, folder / MODEL, renderer.images),
            )
        self._watcher.on_checkpoint(final.update, saved.path)
        return RunResult(
            folder=self.folder.path,
            step=final.update,
            checkpoint=str(saved.path),
            metrics=self._log.last,
            interrupted=False,
        )

    def _build(
        self, path: str, demonstrations: list[Trajectory], filler: int, reader: ImageReader | None, ranks: Ranks
    ) -> LearnerParts:
        config = self.config.model_dump(mode="json")
        with ranks.led(BUILD_LEARNER, config, demonstrations, path, filler):
            return build_learner(
                self.config, demonstrations, model_path=path, pad_id=filler, reader=reader, ranks=ranks
            )

    def _record(self, progress: SFTProgress) -> None:
        metrics = {
            "sft/loss": progress.loss,
            "sft/grad_norm": progress.grad_norm,
            "sft/learning_rate": progress.learning_rate,
            "sft/tokens": float(progress.tokens),
            "sft/updates_skipped": float(bool(progress.non_finite)),
            f"{TIMING_PREFIX}sft_s": progress.seconds,
        }
        self._log.record(progress.update, metrics, updates=progress.updates, skipped=bool(progress.non_finite))

    def _is_enough(self, parts: LearnerParts, path: str, renderer: Renderer, progress: SFTProgress) -> bool:
        """Measure success when it is time to, and say whether it has reached ``sft.stop_at``."""
        settings = self.config.sft
        if settings.stop_at is None or progress.update <= settings.warmup_steps:
            return False
        if progress.update % settings.check_every:
            return False
        self._enter(Phase.EVALUATE)
        model = self._whole_model(parts, path)
        self._success = asyncio.run(success_now(model, renderer, self.config, n_tasks=settings.check_tasks))
        self._enter(Phase.WARM_START)
        self._watcher.on_message(
            f"update {progress.update}: success {self._success:.1%} on {settings.check_tasks} tasks"
        )
        return self._success >= settings.stop_at

    def _whole_model(self, parts: LearnerParts, path: str) -> PreTrainedModel:
        """The model as it is now: a copy, where several ranks hold it."""
        ranks = parts.learner.ranks
        if not ranks.are_many:
            return parts.learner.model
        device = ranks.device(self.config.model.device)
        model = load_model(path, dtype=self.config.model.dtype, device=str(device))
        model.load_state_dict(dict(parts.source.weights()))
        return model

    def _say_how_it_ended(self) -> None:
        settings = self.config.sft
        if settings.stop_at is not None and (self._success is None or self._success < settings.stop_at):
            seen = "nothing was measured" if self._success is None else f"the last was {self._success:.1%}"
            self._watcher.on_message(f"all demonstrations are learnt before sft.stop_at {settings.stop_at:.0%}: {seen}")

    def _enter(self, phase: Phase) -> None:
        self.status.phase = phase
        self._watcher.on_status(self.status)


def warm_start(run: Run, *, watcher: RunWatcher | None = None) -> RunResult:
    """Warm-start a run's model on demonstrations.

    Raises:
        UsageError: no expert, no model, a full disk.
        TrainingError: the loss is not finite.
    """
    return WarmStart(run, watcher=watcher).run()
