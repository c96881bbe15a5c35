"""Endless order of a run's tasks: the environment, the task and the horizon of each draw.

A draw depends on the seed, on the number of earlier draws, and on the outcomes of complete training steps, never on the
speed of episodes. A run that was killed and resumed therefore draws the same tasks as an uninterrupted run.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.environment import CurriculumConfig, PooledBy
from agentrl.config.step_settings import STAGE_MARK, stage_label
from agentrl.errors import UsageError
from agentrl.rollout.curriculum import GroupOutcome, Horizon, Pool, Pools
from agentrl.task import Task, TaskCursor, TaskSource

FETCHED_AHEAD = 64
"""Number of tasks of each remote source that are fetched before they are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTask:
    """Result of one draw of the task sampler."""

    environment: str
    place: int
    """Position in the environment's endless order of tasks."""
    task: Task
    """Drawn task, with its turns limited to the horizon."""
    horizon: int | None = None
    """Maximum number of turns of the curriculum; ``None`` without a horizon."""
    stage: int = 0
    """Stage of the environment's settings."""
    order: str = ""
    """Name of the environment's first settings with the same tasks, whose order and success rates continue."""
    is_proposed: bool = False
    """True if a `ProposedTasks` drew the task, so that the task does not follow from its place."""

    @property
    def settings(self) -> str:
        """Name of the environment's settings; see `agentrl.config.step_settings.stage_label`."""
        return stage_label(self.environment, self.stage)


class TaskSampler:
    """Sampler of tasks from one environment, or from several in exact shares.

    The next environment is the one that is furthest behind its share. No environment ever exceeds its share of all
    draws by a whole draw.

    Args:
        sources: Tasks by the label of their environment and, in later stages, its settings.
        seed: Seed of the run.
        weights: Shares of the draws by label; equal by default.
        curriculum: Pools and horizon.
        shuffle: ``False`` keeps each source's order.
        stages: Training steps after which the stages of an environment begin, by its label.
    """

    def __init__(
        self,
        sources: Mapping[str, TaskSource],
        *,
        seed: int,
        weights: Mapping[str, float] | None = None,
        curriculum: CurriculumConfig | None = None,
        shuffle: bool = True,
        stages: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        settings = curriculum or CurriculumConfig()
        self.position = 0
        self.step = 0
        self._cursors = {label: TaskCursor(source, seed=seed, shuffle=shuffle) for label, source in sources.items()}
        self._stages = stages or {}
        labels = [label for label in sources if STAGE_MARK not in label]
        self._weights = {label: 1.0 if weights is None else weights[label] for label in labels}
        self._turns = dict.fromkeys(labels, 0)
        self._pools = None if settings.pools is None else Pools(settings.pools, seed=seed)
        self._horizon = None if settings.horizon is None else Horizon(settings.horizon)
        self._passed_over = 0
        self._metrics: dict[str, float] = {}
        self._first_settings = functools.cache(self._find_first_settings)

    @property
    def environments(self) -> list[str]:
        """Labels of the environments."""
        return list(self._turns)

    @property
    def wants_outcomes(self) -> bool:
        """True if `learn` uses its outcomes."""
        grows = any(cursor.proposed is not None for cursor in self._cursors.values())
        return grows or self._pools is not None or (self._horizon is not None and self._horizon.wants_outcomes)

    def next(self) -> SampledTask | None:
        """Return the next draw of the endless order; ``None`` if its task must be fetched first (`fetch`)."""
        environment = self._next_environment()
        stage = bisect.bisect_right(self._stages.get(environment, ()), self.step)
        cursor = self._cursors[stage_label(environment, stage)]
        first = self._first_settings(environment, stage)
        if stage and not cursor.position:  # the stage begins
            names = [stage_label(environment, number) for number in range(stage)]
            same = [name for number, name in enumerate(names) if self._first_settings(environment, number) == first]
            cursor.position = max((self._cursors[name].position for name in same), default=0)
        while True:
            if cursor.misses(1):
                self._turns[environment] -= 1  # the next call chooses the same environment
                return None
            place, task = cursor.position, cursor.next()
            if self._pools is None or self._pools.settings.by is PooledBy.ENVIRONMENT:
                break
            if self._pools.plays(first, task, place):
                break
            self._passed_over += 1
        self.position += 1
        horizon = None if self._horizon is None else self._horizon.turns(environment, self.step)
        return self._draw(environment, place, task, horizon, stage, is_proposed=cursor.proposed is not None)

    def _find_first_settings(self, environment: str, stage: int) -> str:
        """Return the name of the first settings of an environment that have the tasks of a stage."""
        names = [stage_label(environment, number) for number in range(stage + 1)]
        own = self._cursors[names[-1]]
        return next(name for name in names if name == names[-1] or own.has_tasks_of(self._cursors[name]))

    async def draw(self) -> SampledTask:
        """Return the next draw; its task must have been fetched."""
        while (drawn := self.next()) is None:
            await self.fetch()
        return drawn

    @property
    def misses_tasks(self) -> bool:
        """True if the next tasks of a remote source have to be fetched."""
        return any(cursor.misses(FETCHED_AHEAD) for cursor in self._cursors.values())

    async def fetch(self) -> None:
        """Fetch the next tasks of remote sources."""
        for cursor in self._cursors.values():
            await cursor.fetch(range(cursor.position, cursor.position + FETCHED_AHEAD))

    async def fetch_draws(self, draws: Sequence[tuple[str, int]]) -> None:
        """Fetch the tasks of earlier draws, given as names of settings and places, before `redraw` repeats them."""
        for environment, cursor in self._cursors.items():
            await cursor.fetch([place for label, place in draws if label == environment])

    def redraw(
        self, environment: str, place: int, horizon: int | None, stage: int = 0, task: Mapping[str, Any] | None = None
    ) -> SampledTask:
        """Repeat an earlier draw; `task` is the record of a proposed one."""
        label = stage_label(environment, stage)
        if label not in self._cursors:
            raise _other_environments([label], list(self._cursors))
        if task is not None:
            return self._draw(environment, place, Task(**task), horizon, stage, is_proposed=True)
        return self._draw(environment, place, self._cursors[label].at(place), horizon, stage)

    def _draw(
        self,
        environment: str,
        place: int,
        task: Task,
        horizon: int | None,
        stage: int,
        *,
        is_proposed: bool = False,
    ) -> SampledTask:
        if horizon is not None:
            task = dataclasses.replace(task, max_turns=min(horizon, task.max_turns or horizon))
        order = self._first_settings(environment, stage)
        return SampledTask(
            environment=environment,
            place=place,
            task=task,
            horizon=horizon,
            stage=stage,
            order=order,
            is_proposed=is_proposed,
        )

    def _next_environment(self) -> str:
        while True:
            environment = self._furthest_behind()
            turn = self._turns[environment]
            self._turns[environment] += 1
            if self._pools is None or self._pools.settings.by is not PooledBy.ENVIRONMENT:
                return environment
            if self._pools.plays(environment, None, turn):
                return environment
            self._passed_over += 1

    def _furthest_behind(self) -> str:
        after = sum(self._turns.values()) + 1
        whole = sum(self._weights.values())
        return max(self._turns, key=lambda label: self._weights[label] * after / whole - self._turns[label])

    def learn(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Learn from all groups that ended since the last training step, whether they were trained on or not."""
        self.step += 1
        self._propose(outcomes)
        if self._horizon is not None:
            self._horizon.learn(outcomes)
        if self._pools is not None:
            self._pools.learn(outcomes)
            sizes = self._pools.sizes()
            self._metrics |= {f"curriculum/{pool}": float(sizes[pool]) for pool in Pool}
            self._metrics["curriculum/passed_over"] = float(self._passed_over)
            self._passed_over = 0

    def _propose(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Hand the proposals of a training step to the task sources of their environments."""
        growing = {label: cursor.proposed for label, cursor in self._cursors.items() if cursor.proposed is not None}
        valid = new = 0
        for label, source in growing.items():
            environment = label.partition(STAGE_MARK)[0]
            found = [proposal for one in outcomes if one.environment == environment for proposal in one.proposals]
            valid, new = valid + len(found), new + source.propose(found)
        if growing:
            self._metrics |= {"proposals/valid": float(valid), "proposals/new": float(new)}

    def metrics(self) -> dict[str, float]:
        """Return the pools' sizes after the latest step, its numbers of skipped draws and of proposals."""
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict` in plain JSON types."""
        return {
            "position": self.position,
            "step": self.step,
            "passed_over": self._passed_over,
            "turns": dict(self._turns),
            "cursors": {label: cursor.state_dict() for label, cursor in self._cursors.items()},
            "pools": None if self._pools is None else self._pools.state_dict(),
            "horizon": None if self._horizon is None else self._horizon.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; raise a `UsageError` for other environments or tasks."""
        if set(state["cursors"]) != set(self._cursors):
            raise _other_environments(list(state["cursors"]), list(self._cursors))
        for label, cursor in self._cursors.items():
            cursor.load_state_dict(state["cursors"][label])
        self.position, self.step = state["position"], state["step"]
        self._passed_over = state["passed_over"]
        self._turns = {label: state["turns"][label] for label in self._turns}
        if self._pools is not None:
            self._pools.load_state_dict(state["pools"])
        if self._horizon is not None:
            self._horizon.load_state_dict(state["horizon"])


def task_record(task: Task) -> dict[str, Any]:
    """Return a proposed task, which has no messages, in plain JSON types."""
    return {one.name: getattr(task, one.name) for one in dataclasses.fields(task) if one.name != "messages"}


def _other_environments(saved: list[str], present: list[str]) -> UsageError:
    return UsageError("the saved task order belongs to other environments", got=saved, expected=present)
