"""A run of supervised fine-tuning on demonstrations of the environments' experts or on a file: `agentrl sft`.

expert ─► episodes through the agent loop ─► ledger (forced tokens) ─► cross-entropy
                          or a file of conversations ──►┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from transformers import PreTrainedModel

from agentrl.builders.adapter_checks import check_adapters, refuse_role_adapters
from agentrl.builders.checks import check_agents
from agentrl.builders.cluster import refuse_cluster
from agentrl.builders.episodes import RunEnvironment, build_run_environments, build_task_sampler, close_run_environments
from agentrl.builders.group_extras import check_experts
from agentrl.builders.models import build_renderer, start_renderer
from agentrl.builders.trainers import LearnerParts, build_learner, build_on_ranks
from agentrl.config.config import SCRATCH, Config
from agentrl.config.estimate import counted
from agentrl.config.trainer import SFTConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.evaluation.periodic import success_now
from agentrl.models.load import load_model
from agentrl.observe.progress import Phase
from agentrl.observe.trajectory_store import TrajectoryStore, read_trajectories, void_after
from agentrl.render.renderer import Renderer
from agentrl.render.tokenizers import load_tokenizer
from agentrl.rollout.events import RolloutObserver
from agentrl.rollout.loop_choice import check_rendering
from agentrl.rollout.runner import Assignment, play_all
from agentrl.rollout.scripted_policies import ScriptedEpisodePolicy, ScriptedPolicy
from agentrl.rollout.turns import derive_seed
from agentrl.rollout.waits import WaitTracker
from agentrl.runs.learning_run import LearningRun, Prepared, digest_trajectories
from agentrl.runs.record import EpisodeRecorder
from agentrl.runs.stop import run_until_stopped
from agentrl.task import Task
from agentrl.training.chat_file import build_sft_dataset, check_chats, read_chats
from agentrl.training.distributed import Ranks
from agentrl.training.sft import SupervisedLearner
from agentrl.trajectory import Trajectory

_GROUP = "demonstration-"
"""Prefix of the group ids of demonstrations, before their number."""


async def collect_demonstrations(
    config: Config,
    renderer: Renderer,
    *,
    observer: RolloutObserver | None = None,
    on_stall: Callable[[str], None] = lambda _: None,
    waits: WaitTracker | None = None,
) -> list[Trajectory]:
    """Let experts play ``sft.episodes`` tasks of the training splits in the format of the agent.

    Several environments share the episodes in proportion to their weights.

    `on_stall` receives a table of waits if no episode makes progress for ``rollout.stall_report_s``.

    Returns:
        Demonstrations that solved their task, or all trainable ones if success is unknown, in the order of tasks.

    Raises:
        UsageError: an environment has no expert, or its expert solved no task.
    """
    tasks = build_task_sampler(config)
    policy = ScriptedEpisodePolicy(
        ScriptedPolicy.EXPERT, renderer, max_context=config.agent.max_tokens, mistakes=config.sft.mistakes
    )
    environments = build_run_environments(config, policy, observer=observer, waits=waits)
    played: dict[int, Trajectory] = {}
    try:
        draws = [await tasks.draw() for _ in range(config.sft.episodes)]
        with environments[0].pool.waits.report_stalls(config.rollout.stall_report_s, on_stall):
            for environment in environments:
                own = {
                    number: _assignment(draw.task, number, config.run.seed)
                    for number, draw in enumerate(draws)
                    if draw.environment == environment.label
                }
                played |= await _play_demonstrations(environment, own)
    finally:
        await close_run_environments(environments)
    return [played[number] for number in sorted(played)]


async def _play_demonstrations(
    environment: RunEnvironment, assignments: Mapping[int, Assignment]
) -> dict[int, Trajectory]:
    """Play the demonstrations of one environment, and return the trainable ones by number."""
    numbers = {assignment.group_id: number for number, assignment in assignments.items()}
    found: dict[int, Trajectory] = {}
    concurrency = environment.config.rollout.max_concurrent
    async for trajectory in play_all(environment.runner, assignments.values(), concurrency=concurrency):
        found[numbers[trajectory.group_id]] = trajectory
    return _select_trainable(found)


def _assignment(task: Task, number: int, seed: int) -> Assignment:
    group_id = f"{_GROUP}{number}"
    return Assignment(task=task, group_id=group_id, member=0, seed=derive_seed(seed, group_id))


def _select_trainable(played: Mapping[int, Trajectory]) -> dict[int, Trajectory]:
    reporting = {t.environment for t in played.values() if t.success is not None}
    good = {
        number: t
        for number, t in played.items()
        if t.outcome is not None and t.outcome.is_trainable and (t.success or t.environment not in reporting)
    }
    if played and not good:
        last = played[max(played)]
        raise UsageError(
            f"no demonstration of {last.environment} can be trained on",
            got=f"{len(played)} episodes, the last one {last.outcome}: {last.error or 'task not solved'}",
            expected="an expert that solves tasks within the agent's budgets",
        )
    return good


class WarmStart(LearningRun):
    """A run of supervised fine-tuning."""

    name, command, section, phase = "sft", "sft", "sft", Phase.WARM_START

    @property
    def settings(self) -> SFTConfig:
        """The ``sft`` section."""
        return self.config.sft

    async def prepare(self, *, resumes: bool) -> Prepared:
        """Find or make the model, and play demonstrations or read the file.

        Raises:
            UsageError: no expert, file or model found, no task solved, or the disk is full.
        """
        base = await self.find_base()
        tokenizer = load_tokenizer(base)
        self._renderer = build_renderer(self.config, base, tokenizer)
        if self.settings.data is not None:
            demonstrations = self._read(self.settings.data)
        elif resumes or self._has_all_demonstrations():
            demonstrations = _read_demonstrations(self.folder.trajectories)
        else:
            demonstrations = await self._play()

        def load(model: str, ranks: Ranks) -> LearnerParts:
            learned = (SupervisedLearner, self.config, demonstrations, self.settings)
            return build_on_ranks(ranks, build_learner, *learned, model, base)

        data = digest_trajectories(demonstrations)
        return Prepared(base=base, data=data, load=load, tokenizer=tokenizer, images=self._renderer.images)

    def _has_all_demonstrations(self) -> bool:
        """Return True if the run was killed before its first checkpoint, but after all demonstrations were stored."""
        ended, expected = _read_ended(self.folder.trajectories), self.settings.episodes
        found = sum(t.outcome is not None and not t.outcome.is_retryable for t in ended)
        if ended:
            self.say(
                f"the run has no checkpoint: {found} of {expected} demonstrations are stored, "
                + ("and are used again" if found == expected else "and all are played again")
            )
        return found == expected

    async def _play(self) -> list[Trajectory]:
        """Let the experts play demonstrations, and store them."""
        check_rendering(self.config, self._renderer, say=self.say)
        self.enter(Phase.DEMONSTRATE)
        void_after(self.folder.trajectories, 0, 0)
        with TrajectoryStore(self.folder.trajectories, step=0) as store:
            recorder = EpisodeRecorder(store, self.status, self._watcher, self._waits, says_at_once=True)
            return await collect_demonstrations(
                self.config, self._renderer, observer=recorder, on_stall=self.say, waits=self._waits
            )

    def _read(self, file: str) -> list[Trajectory]:
        """Read the conversations of a file that fit into ``agent.max_tokens``."""
        found = build_sft_dataset(read_chats(file), self._renderer, max_tokens=self.config.agent.max_tokens)
        if found.too_long:
            self.say(f"left out: {counted(found.too_long, 'conversation')} longer than agent.max_tokens")
        return found.trajectories

    def is_enough(self, parts: LearnerParts, base: str) -> bool:
        """Measure success if due; return True if it has reached ``sft.stop_at``."""
        settings, done = self.settings, parts.learner.done
        if settings.stop_at is None:
            return False
        if done > settings.warmup_steps and done % settings.check_every == 0:
            self.enter(Phase.EVALUATE)
            measured = success_now(
                self._whole_model(parts, base), self._renderer, self.config, n_tasks=settings.check_tasks
            )
            self.success = run_until_stopped(measured, self.interruption)
            self.enter(Phase.WARM_START)
            self.say(f"update {done}: success {self.success:.1%} on {settings.check_tasks} tasks")
            if self.success >= settings.stop_at:
                return True
        if done == parts.learner.updates:
            got = "not measured" if self.success is None else f"got {self.success:.1%}"
            self.say(
                f"all demonstrations were used before sft.stop_at was reached: expected {settings.stop_at:.0%}, {got}"
            )
        return False

    def _whole_model(self, parts: LearnerParts, path: str) -> PreTrainedModel:
        """Return the current model; with several ranks, a copy."""
        ranks = parts.learner.ranks
        if not ranks.is_distributed:
            return parts.source.model
        device = ranks.device(self.config.model.device)
        model = load_model(path, dtype=self.config.model.dtype, device=str(device))
        model.load_state_dict(dict(parts.source.weights()))
        return model


def _read_demonstrations(folder: Path) -> list[Trajectory]:
    """Read the demonstrations that a run has stored, as `collect_demonstrations` returned them."""
    good = _select_trainable({int(t.group_id.removeprefix(_GROUP)): t for t in _read_ended(folder)})
    return [good[number] for number in sorted(good)]


def _read_ended(folder: Path) -> list[Trajectory]:
    """Read the last attempt at each demonstration; none if the folder is gone."""
    stored = read_trajectories(folder) if folder.is_dir() else ()
    return list({found.trajectory.group_id: found.trajectory for found in stored}.values())


warm_start = WarmStart.start
"""Warm-start a run's model on demonstrations; see `LearningRun.start`."""


def check_warm_start(config: Config) -> None:
    """Check the config of SFT: the file can be read, or every environment has an expert.

    Raises:
        ConfigError: the config has a cluster or named adapters, or a model from scratch would be trained on a file.
        UsageError: the file does not exist or is invalid, an environment has no expert, or its agent loop does not
            support demonstrations.
    """
    refuse_cluster(config, "a warm start")
    refuse_role_adapters(config, "agentrl sft")
    check_adapters(config, allows_dropout=True)
    if config.sft.data is None:
        check_experts(config)
        return
    read_chats(config.sft.data)
    if config.model.path == SCRATCH:
        raise ConfigError(
            "sft.data needs a model",
            got="model.path scratch, whose vocabulary comes from an environment's text",
            expected="a folder or a name",
            hint="set model.path, or --model",
        )


def check_sft_start(config: Config, *, fetch: bool = True, say: Callable[[str], None] = lambda _: None) -> None:
    """Check the conversations of a file, or the agents that experts demonstrate with; see `StartCheck`."""
    if config.sft.data is None:
        check_agents(config)
    renderer = start_renderer(config, fetch=fetch)
    if renderer is None:
        return
    if config.sft.data is not None:
        check_chats(read_chats(config.sft.data), renderer)
    else:
        check_rendering(config, renderer, say=say)
