"""New rewards for stored episodes, without an engine."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from agentrl.config.config import Config
from agentrl.config.derived import EnvironmentConfigs, per_environment_configs
from agentrl.config.step_settings import environment_stages
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError, RewardFailure, UsageError, with_location
from agentrl.errors.deadlines import async_boundary
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_index import EpisodeFilter, EpisodeRow, TrajectoryIndex
from agentrl.observe.trajectory_record import environment_label
from agentrl.observe.trajectory_store import StoredTrajectory
from agentrl.reward import Score, Scorer, checked_score, rewards_differ, with_role_rewards
from agentrl.rollout.env_workers import ThreadWorker
from agentrl.rollout.reward_functions import find_reward
from agentrl.rollout.task_source import task_source
from agentrl.task import ProposedTasks, Task
from agentrl.trajectory import Trajectory

CONCURRENT = 64
"""Number of episodes scored at a time; calls to a blocking function run one at a time."""
SCORE_TIMEOUT_S = 600.0
"""Deadline of one episode; each function has its own, shorter one."""


Tasks: TypeAlias = dict[tuple[str, str], Task]
"""Tasks by the label of their environment and, in later stages, its settings, and by id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoredEpisode:
    """A stored episode with a new reward."""

    trajectory: Trajectory
    step: int
    """Training step during which the episode ended."""
    score: Score | None
    """New score, with the rewards that count only for single roles; ``None`` if the scorer failed."""
    error: str | None = None
    """Why the scorer failed."""

    def to_record(self) -> dict[str, Any]:
        """Return the rewards as plain JSON types."""
        return {
            "id": self.trajectory.id,
            "task_id": self.trajectory.task_id,
            "environment": self.trajectory.environment,
            "step": self.step,
            "success": self.trajectory.success,
            "stored_reward": self.trajectory.reward,
            "reward": None if self.score is None else self.score.reward,
            "components": {} if self.score is None else dict(self.score.components),
            "sources": {} if self.score is None else dict(self.score.sources),
            "error": self.error,
        }


@dataclass(slots=True)
class RescoringSummary:
    """Comparison of stored and new rewards, over the episodes that have both."""

    episodes: int = 0
    without_messages: int = 0
    """Number of episodes that were stored without messages, which are skipped."""
    abstained: int = 0
    """Number of episodes to which the new scorer gives no reward."""
    errors: Counter[str] = field(default_factory=Counter)
    """Number of scorer failures by code location and what happened."""
    pairs: list[tuple[float, float]] = field(default_factory=list)
    """Stored and new reward of each episode."""
    by_success: defaultdict[bool, list[float]] = field(default_factory=lambda: defaultdict(list))
    """New rewards of the episodes that solved their task, and of those that did not."""
    groups: defaultdict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """Pairs by group."""

    def add(self, episode: RescoredEpisode) -> None:
        """Count an episode."""
        self.episodes += 1
        stored = episode.trajectory.reward
        if episode.score is None:
            self.errors[episode.error or ""] += 1
        elif episode.score.reward is None:
            self.abstained += 1
        else:
            new = episode.score.reward
            if episode.trajectory.success is not None:
                self.by_success[episode.trajectory.success].append(new)
            if stored is not None:
                self.pairs.append((stored, new))
                self.groups[episode.trajectory.group_id].append((stored, new))

    @property
    def n_scored(self) -> int:
        """Number of episodes with a new reward."""
        return self.episodes - self.abstained - self.errors.total()

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain JSON types; a value that is not defined is ``None``."""
        stored, new = [pair[0] for pair in self.pairs], [pair[1] for pair in self.pairs]
        return {
            "episodes": self.episodes,
            "scored": self.n_scored,
            "abstained": self.abstained,
            "without_messages": self.without_messages,
            "errors": dict(self.errors.most_common()),
            "stored_reward": _mean(stored),
            "reward": _mean(new),
            "changed": sum(rewards_differ(pair) for pair in self.pairs),
            "correlation": _correlation(stored, new),
            "reward_of_successes": _mean(self.by_success[True]),
            "reward_of_failures": _mean(self.by_success[False]),
            "groups": len(self.groups),
            "groups_that_differ_stored": sum(_differs(pairs, 0) for pairs in self.groups.values()),
            "groups_that_differ": sum(_differs(pairs, 1) for pairs in self.groups.values()),
        }


def environments_played(config: Config) -> tuple[EnvironmentConfigs, ...]:
    """Return the environments of a run, and those of its later stages."""
    return (*per_environment_configs(config), *environment_stages(config))


def find_environment(parts: Sequence[EnvironmentConfigs], played: Trajectory | EpisodeRow) -> EnvironmentConfigs:
    """Return the environment of a run in which an episode was played.

    Raises:
        UsageError: the run has no environment of this name.
    """
    own = [part for part in parts if part.config.sole_environment.name == played.environment]
    labelled = [part for part in own if part.label == environment_label(played.group_id, played.task_id)]
    if not own:
        raise UsageError(
            f"episode {played.id} was played in {played.environment}, which is not an environment of the run",
            got=", ".join(part.config.sole_environment.name for part in parts),
            expected=played.environment,
        )
    return (labelled or own)[0]


def find_scorers(parts: Iterable[EnvironmentConfigs]) -> dict[str, Scorer]:
    """Return the scorer of each environment of a run, by label: the reward functions of ``agent.reward``.

    Raises:
        UnknownNameError: a reward function does not exist.
        ConfigError: an object is not a reward function, or the scorer is a judge or a reward model.
    """
    found = {}
    for part in parts:
        agent = part.config.agent
        if agent.judge is not None or agent.reward_model is not None:
            raise ConfigError(
                "stored episodes can be rescored only by reward functions",
                got="agent.judge" if agent.judge is not None else "agent.reward_model",
                expected="--reward module:function",
            )
        found[part.label] = find_reward(agent, ThreadWorker())
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoringRequest:
    """Stored episodes to score; episodes with infrastructure failures are never selected."""

    run: RunDirectory
    parts: Sequence[EnvironmentConfigs]
    """Environments of the run; see `environments_played`."""
    first_step: int = 0
    task_id: str | None = None

    @property
    def _filter(self) -> EpisodeFilter:
        return EpisodeFilter(first_step=self.first_step, task_id=self.task_id, is_infrastructure=False)

    def read(self) -> Iterator[StoredTrajectory]:
        """Read the episodes with their messages, in the order in which they ended."""
        with TrajectoryIndex(self.run.trajectories) as index:
            for row in index.select(self._filter):
                yield index.read(row, messages=True)

    def tasks_by_environment(self) -> dict[str, Counter[str]]:
        """Return how many episodes each task has, by the environment's label and task id."""
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        with TrajectoryIndex(self.run.trajectories) as index:
            for row in index.select(self._filter):
                found[find_environment(self.parts, row).label][row.task_id] += 1
        return dict(found)


async def rescore(
    request: RescoringRequest, tasks: Tasks, scorers: Mapping[str, Scorer], summary: RescoringSummary
) -> AsyncIterator[RescoredEpisode]:
    """Score stored episodes, and yield them in the order in which they ended; those without messages are skipped.

    Scorers are by the environment's label; `summary` receives the counts and rewards.
    """
    chosen = request.read()
    while batch := list(islice(chosen, CONCURRENT)):
        known = [stored for stored in batch if stored.trajectory.conversations]
        summary.without_messages += len(batch) - len(known)
        labels = [find_environment(request.parts, stored.trajectory).label for stored in known]
        scoring = (_score(one, tasks, scorers, label) for one, label in zip(known, labels, strict=True))
        for episode in await asyncio.gather(*scoring):
            summary.add(episode)
            yield episode


def find_tasks(parts: Iterable[EnvironmentConfigs], wanted: Mapping[str, Iterable[str]]) -> Tasks:
    """Find tasks, given by the label of their environment, in its source, which is read until all are found.

    Raises:
        UsageError: a task is not in its source.
    """
    found: Tasks = {}
    for part in parts:
        environment = part.config.sole_environment
        missing = set(wanted.get(part.label, ()))
        source = task_source(resolve_environment(environment.name), environment)
        if missing and isinstance(source, ProposedTasks):
            raise UsageError(
                f"the tasks of {environment.name} were proposed by episodes, and are not among its own tasks",
                got=", ".join(sorted(missing)[:3]),
                expected="episodes of another split, such as those of an evaluation",
            )
        for index in range(len(source)):
            if not missing:
                break
            task = source[index]
            if task.id in missing:
                missing.discard(task.id)
                found[part.label, task.id] = task
        if missing:
            raise UsageError(
                f"{len(missing)} tasks of the stored episodes are not among the tasks of {environment.name}",
                got=", ".join(sorted(missing)[:3]),
                expected=f"the tasks with which the run was started ({environment.tasks or environment.split})",
                hint="the task file or the environment has changed since the run",
            )
    return found


async def _score(stored: StoredTrajectory, tasks: Tasks, scorers: Mapping[str, Scorer], label: str) -> RescoredEpisode:
    trajectory = stored.trajectory
    task = tasks[label, trajectory.task_id]
    try:
        async with async_boundary(RewardFailure, f"scoring task {task.id}", deadline_s=SCORE_TIMEOUT_S):
            score = await checked_score(scorers[label], trajectory, task)
    except RewardFailure as failure:
        error = f"{with_location(failure.subject or failure.what, failure.location)}: {failure.reason}"
        return RescoredEpisode(trajectory=trajectory, step=stored.step, score=None, error=error)
    if own := trajectory.own_rewards:
        score = with_role_rewards(score, scorers[label], own)
    return RescoredEpisode(trajectory=trajectory, step=stored.step, score=score)


def _differs(pairs: Iterable[tuple[float, float]], which: int) -> bool:
    return rewards_differ([pair[which] for pair in pairs])


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Pearson's correlation; ``None`` if one side is constant."""
    if not (rewards_differ(first) and rewards_differ(second)):
        return None
    return statistics.correlation(first, second)
