"""What the environment check is about: the environment, the tasks that are played, and what a rule may raise."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.task import Task, TaskSource
from agentrl.testing.env_session import EnvSession, Moment, Played, Policy, expert_policy, play, random_policy
from agentrl.testing.env_transcript import Elsewhere, transcript, transcript_of_new_process


class Broken(Exception):
    """A rule is broken; the message says how."""


class Suspect(Exception):
    """A rule looks broken, and there may be a reason; the message says what was seen."""


class Missing(Exception):
    """The environment does not have what the rule is about; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule found where nothing is wrong."""

    detail: str
    figures: Mapping[str, float] = field(default_factory=dict)
    """Measured numbers by name; the unit ends the name."""


class Thoroughness(enum.StrEnum):
    """How much is played."""

    QUICK = "quick"
    """A second or two for a fast environment: for tests."""
    FULL = "full"
    """Up to a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a thoroughness means. A number of seconds ends what would take longer."""

    split_tasks: int
    """Tasks per split that are compared with those of other splits."""
    split_s: float
    openings: int
    """Tasks whose openings are compared with each other, and with those of other splits."""
    openings_s: float
    scored: int
    """Episodes of a score."""
    scored_s: float
    lazy_s: float
    """Seconds of play by each policy that does no work."""
    timed_s: float
    """Seconds of timed play."""
    growth_episodes: int
    """Episodes over which memory is watched."""
    growth_s: float
    call_s: float
    """Seconds within which a call of the environment must return."""


EFFORTS: Mapping[Thoroughness, Effort] = {
    Thoroughness.QUICK: Effort(
        split_tasks=300,
        split_s=0.2,
        openings=16,
        openings_s=0.2,
        scored=0,
        scored_s=0.0,
        lazy_s=0.1,
        timed_s=0.1,
        growth_episodes=1000,
        growth_s=0.2,
        call_s=10.0,
    ),
    Thoroughness.FULL: Effort(
        split_tasks=100_000,
        split_s=3.0,
        openings=200,
        openings_s=3.0,
        scored=200,
        scored_s=5.0,
        lazy_s=2.0,
        timed_s=3.0,
        growth_episodes=1000,
        growth_s=15.0,
        call_s=30.0,
    ),
}
SIDE_BY_SIDE = 4
"""Episodes that are played at the same time."""
SIDE_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is checked. What several rules look at is played once."""

    spec: EnvironmentSpec
    options: Mapping[str, Any]
    split: str
    source: TaskSource
    """All tasks of the split."""
    tasks: Sequence[Task]
    """Those that are played; at least one."""
    limit: int
    """Steps after which play stops."""
    effort: Effort
    plays_elsewhere: bool
    """Whether a rule looks at what a new process plays; that one plays first, so that it ends if one must."""

    @contextmanager
    def session(self) -> Iterator[EnvSession]:
        """A new environment, closed at the end."""
        session = EnvSession(self.spec.make, self.options)
        try:
            yield session
        finally:
            session.close()

    def play(self, policy_of: Callable[[Task], Policy], tasks: Iterable[Task] | None = None) -> list[Played]:
        """An episode of each task, in one environment; of `tasks` that are given, as many as time allows."""
        with self.session() as session:
            if tasks is None:
                return [play(session, task, policy_of(task), self.limit) for task in self.tasks]
            timed = until(self.effort.scored_s, tasks)
            return [play(session, task, policy_of(task), self.limit) for task in timed]

    @cached_property
    def random_episodes(self) -> list[Played]:
        """An episode of each task by the random policy."""
        return self.play(lambda task: random_policy(task.seed))

    @cached_property
    def expert_episodes(self) -> list[Played]:
        """An episode of each task by the expert.

        Raises:
            Missing: there is none.
        """
        with self.session() as session:
            if session.find("expert") is None:
                raise Missing("no expert()")
        return self.play(lambda _task: expert_policy())

    @cached_property
    def transcript(self) -> list[Moment]:
        """What random play of the tasks shows, one after the other."""
        return transcript(self.spec.make, self.options, self.tasks, self.limit)

    @cached_property
    def elsewhere(self) -> Elsewhere:
        """What the same play shows in a new process."""
        return transcript_of_new_process(self.spec.make, self.options, self.tasks, self.limit)

    @cached_property
    def alone(self) -> list[Played]:
        """The first random steps of some tasks, each in an environment of its own."""
        episodes = []
        for task in self.tasks[:SIDE_BY_SIDE]:
            with self.session() as session:
                episodes.append(play(session, task, random_policy(task.seed), min(self.limit, SIDE_STEPS)))
        return episodes


def until(seconds: float, items: Iterable[Any]) -> Iterator[Any]:
    """The items that can be had within some seconds; at least one."""
    end = time.perf_counter() + seconds
    for item in items:
        yield item
        if time.perf_counter() > end:
            return
