"""Rollouts without a trainer: the config's tasks, engine and policy, and the records of a training run.

    task sampler ─► scheduler ─► episodes ─► trajectories/step-N.jsonl, metrics.jsonl

A "step" consists of ``trainer.tasks_per_step`` groups; the run plays ``trainer.steps`` of them. Tasks, seeds and ids
are those of a training run with the same config. The stored episodes are the run's only state: a resumed run plays
the missing ones.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from agentrl.builders.episodes import build_run_environments, build_task_sampler, close_run_environments
from agentrl.builders.group_extras import learning_signal, policy_group_size
from agentrl.config.config import Config
from agentrl.config.load import load_config
from agentrl.config.resume_rules import changes, check_same_run
from agentrl.config.step_settings import Settings
from agentrl.errors import UsageError
from agentrl.evaluation.evaluate import PolicyKind, open_policy
from agentrl.observe.files import replace_file
from agentrl.observe.metrics import TIMING_PREFIX, read_metrics, trajectory_metrics
from agentrl.observe.progress import Phase, RunWatcher
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trackers import traces_episodes
from agentrl.observe.trajectory_index import EpisodeFilter, TrajectoryIndex
from agentrl.observe.trajectory_store import TrajectoryStore
from agentrl.rollout.events import RolloutObserver
from agentrl.rollout.finished_episodes import RecoveredEpisodes, group_position
from agentrl.rollout.group_metrics import environment_metrics
from agentrl.rollout.groups import Group
from agentrl.rollout.policies import EngineEpisodePolicy
from agentrl.rollout.scheduler import GroupScheduler
from agentrl.rollout.tracing import EpisodeTracer
from agentrl.runs.loop import RunLoop
from agentrl.runs.record import EpisodeRecorder
from agentrl.runs.start import Run, start_run
from agentrl.runs.stop import StopRequest, run_until_stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """Result of a rollout run."""

    folder: Path
    groups: int
    """Number of complete groups."""
    episodes: int
    """Number of episodes in them."""


def start_rollout(config: Config) -> Run:
    """Create the folder of a new rollout run; see `start_run`."""
    run = start_run(config, kind="rollout", command="rollout")
    _write_size(run)
    return run


def resume_rollout(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """Open a rollout run to resume it.

    Args:
        path: Folder of the run, or ``runs/latest``.
        overrides: Changes of the config, such as ``trainer.steps=200``.

    Raises:
        UsageError: the folder contains no rollout run.
        ConfigError: an override is invalid or not allowed on resume.
    """
    folder = RunDirectory.open(path)
    if not folder.rollout_file.is_file():
        raise UsageError(
            f"{folder.path} is not a rollout run",
            got="no rollout.json",
            expected="a run of agentrl rollout",
            hint="resume a training run with: agentrl train --resume RUN",
        )
    config = load_config(folder.config_file, overrides)
    found = changes(load_config(folder.config_file), config)
    check_same_run(found)
    return Run(folder, config, found)


def play(run: Run, *, watcher: RunWatcher | None = None, interruption: StopRequest | None = None) -> RolloutResult:
    """Play the missing episodes of a rollout run; the calling thread must not have a running event loop.

    Args:
        run: Folder and config.
        watcher: Receives the progress.
        interruption: Stops the run from another thread; signals only reach the main thread.

    Raises:
        KeyboardInterrupt: the run was stopped; its finished episodes are stored.
        UsageError: the user must change something.
        TrainingError: several groups in a row have failed.
    """
    interruption = interruption or StopRequest()
    return run_until_stopped(Rollout(run, watcher=watcher, interruption=interruption).run(), interruption)


@dataclass(frozen=True, slots=True)
class _Played:
    """Episodes that earlier processes of the run have stored."""

    first: int = 0
    """Position of the first incomplete group."""
    complete: frozenset[str] = frozenset()
    """Ids of the complete groups from `first` on."""
    episodes: RecoveredEpisodes = field(default_factory=RecoveredEpisodes)
    """Episodes of the groups from `first` on."""


class Rollout(RunLoop):
    """Rollouts of one run.

    Args:
        run: Folder and config.
        watcher: Receives the progress.
        interruption: Stops the run.
    """

    command = "rollout"

    def __init__(self, run: Run, *, watcher: RunWatcher | None = None, interruption: StopRequest | None = None) -> None:
        super().__init__(run, watcher=watcher, interruption=interruption)
        self._run = run
        self._size = policy_group_size(run.config.algorithm)
        self._batch: list[Group] = []

    async def run(self) -> RolloutResult:
        """Play until all groups are complete."""
        total = self.config.trainer.steps * self.config.trainer.tasks_per_step
        with self._running():
            self.enter(Phase.PREPARE)
            self._played = self._read_played()
            if self._played.first >= total:
                self._end_at_once()
            else:
                async with AsyncExitStack() as stack:
                    await self._prepare(stack, total)
                    await self._play(total)
        return RolloutResult(folder=self.folder.path, groups=total, episodes=total * self._size)

    def _end_at_once(self) -> None:
        """Say that nothing is left to play; neither an engine nor an environment has been started."""
        self.status.step = _last_step(self.folder)
        more = 2 * self.config.trainer.steps
        text = f"all episodes of the run have been played; to play more, add trainer.steps={more}"
        self.say(text)
        self._save_changes()

    def _save_changes(self) -> None:
        super()._save_changes()
        _write_size(self._run)

    async def _prepare(self, stack: AsyncExitStack, total: int) -> None:
        config, folder = self.config, self.folder
        self._watch_stalls(stack)
        if config.curriculum.horizon is not None or config.curriculum.pools is not None:
            self.say("curriculum is not used: without a trainer, all tasks are drawn in the order of the run")
        self.status.step = _last_step(self.folder)
        self._open_metrics(stack)
        stack.push_async_exit(self._close_trackers_in_thread)
        self._store = stack.enter_context(TrajectoryStore(folder.trajectories, step=self.status.step + 1))
        policy = await stack.enter_async_context(open_policy(config, PolicyKind.ENGINE, folder.path, trains=True))
        if isinstance(policy, EngineEpisodePolicy):
            self._status_writer.engines["engine"] = policy.engine
        recorder = EpisodeRecorder(self._store, self.status, self._watcher, self._waits)
        observer: RolloutObserver = recorder
        if traces_episodes(config.trackers):
            observer = EpisodeTracer(recorder, self._waits, self.status, self._trace)
        environments = build_run_environments(config, policy, observer=observer, folder=folder.path, waits=self._waits)
        stack.push_async_callback(close_run_environments, environments)
        tasks = build_task_sampler(config)
        for _ in range(self._played.first):
            await tasks.draw()
        self._scheduler = GroupScheduler(
            {environment.label: environment.runner for environment in environments},
            tasks,
            group_size=self._size,
            batch=1,
            max_staleness=max(0, total - self._played.first - 1),
            batch_order="greedy",
            max_concurrent=config.rollout.max_concurrent,
            seed=config.run.seed,
        )
        if kept := self._scheduler.recover(self._played.episodes):
            self.say(f"kept {kept} finished episodes of incomplete and later groups")
        stack.push_async_callback(self._scheduler.close)
        self._has_signal = learning_signal(Settings(config))
        self._save_changes()

    def _read_played(self) -> _Played:
        """Read the episodes that are already stored."""
        if not self.folder.trajectories.is_dir():
            return _Played()
        with TrajectoryIndex(self.folder.trajectories) as index:
            rows = index.select(EpisodeFilter(is_trainable=True))
            members: defaultdict[int, set[int | None]] = defaultdict(set)
            for row in rows:
                members[group_position(row.group_id)].add(row.member)
            first = 0
            while len(members[first]) >= self._size:
                first += 1
            later = [row for row in rows if group_position(row.group_id) >= first]
            complete = {row.group_id for row in later if len(members[group_position(row.group_id)]) >= self._size}
            episodes = RecoveredEpisodes((index.read(row).trajectory for row in later), are_stored=True)
        return _Played(first, frozenset(complete), episodes)

    async def _play(self, total: int) -> None:
        self.enter(Phase.ROLLOUT)
        self._began = time.perf_counter()
        for done in range(self._played.first + 1, total + 1):
            (group,) = await self._scheduler.next_batch()
            if group.id not in self._played.complete:
                self._batch.append(group)
            if len(self._batch) == self.config.trainer.tasks_per_step or (done == total and self._batch):
                self._end_step()

    def _end_step(self) -> None:
        """Write the metrics of the groups that ended since the last step."""
        groups, self._batch = self._batch, []
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        metrics = {
            **trajectory_metrics(trajectories, version=0),
            **environment_metrics(groups, has_signal=self._has_signal),
            f"{TIMING_PREFIX}step_s": seconds,
            f"{TIMING_PREFIX}tokens_per_s": sum(one.sampled_tokens for one in trajectories) / seconds,
        }
        self._record_step(self.status.step + 1, metrics)
        self._store.rotate(self.status.step + 1)


def _last_step(folder: RunDirectory) -> int:
    return max((int(line["step"]) for line in read_metrics(folder.metrics_file)), default=0)


def _write_size(run: Run) -> None:
    groups = run.config.trainer.steps * run.config.trainer.tasks_per_step
    replace_file(run.folder.rollout_file, orjson.dumps({"groups": groups}))
