"""What the environment check is about: the environment, the tasks that are played, and what a rule may raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.task import Task
from agentrl.testing.env_session import EnvSession, Played, Policy, play, random_policy


class Broken(Exception):
    """A rule is broken; the message says how."""


class Missing(Exception):
    """The environment does not have what the rule is about; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is checked."""

    spec: EnvironmentSpec
    options: Mapping[str, Any]
    tasks: Sequence[Task]
    """The tasks that are played; at least one."""
    limit: int
    """Steps after which play stops."""

    @contextmanager
    def session(self) -> Iterator[EnvSession]:
        """A new environment, closed at the end."""
        session = EnvSession(self.spec.make, self.options)
        try:
            yield session
        finally:
            session.close()

    def play(self, policy_of: Callable[[Task], Policy]) -> list[Played]:
        """An episode of each task, in one environment."""
        with self.session() as session:
            return [play(session, task, policy_of(task), self.limit) for task in self.tasks]

    def play_randomly(self) -> list[Played]:
        """An episode of each task by the random policy."""
        return self.play(lambda task: random_policy(task.seed))
