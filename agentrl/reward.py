"""Scoring: how the return of a finished episode is computed from what happened."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import shlex
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import (
    A_REWARD,
    BudgetSpent,
    InfrastructureError,
    RewardFailure,
    SourceLocation,
    UsageError,
    bounded_reward,
    described_error,
    is_addressed_to,
    raised_at,
    raised_in,
    running_task,
    shortened,
    with_location,
)
from agentrl.task import Task
from agentrl.trajectory import Trajectory

ROUNDING = 1e-9
"""Rewards that differ by less than this share of the largest of them are equal but for rounding."""

LEAST_DIFFERENCE = 1e-12
"""Rewards that differ by less than this are equal, too: what rounding leaves of sums that cancel."""


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return True if some rewards are further from the mean of all than rounding explains.

    >>> rewards_differ([0.3, 0.1 + 0.2]), rewards_differ([0.7, 0.7, 0.7]), rewards_differ([0.0, 1.0])
    (False, False, True)
    """
    if not rewards:
        return False
    mean = math.fsum(reward / len(rewards) for reward in rewards)
    bound = LEAST_DIFFERENCE + ROUNDING * max(map(abs, rewards))
    return any(abs(reward - mean) > bound for reward in rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A scorer's verdict."""

    reward: float | None
    """``None``: nothing can be said, the episode does not train."""
    components: Mapping[str, float] = field(default_factory=dict)


class Scorer(ABC):
    """Scores finished episodes.

    An exception, or a reward that is no finite number, fails the episode as a failure of its environment does. Most
    rewards are plain functions instead: see docs/reward-functions.md.
    """

    @property
    def definitions(self) -> Mapping[str, SourceLocation | None]:
        """Places where the reward code is defined, by name; empty if the environment alone decides."""
        return {type(self).__name__: defined_in(self)}

    @abstractmethod
    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Score one episode; must not change the trajectory."""


class GroupScorer(Scorer):
    """Scores the finished episodes of a group together, by comparing them.

    It is called once per group, after the last episode has ended and before advantages are computed. Episodes that
    infrastructure failed are left out. The messages of the episodes are gone by then: it reads their tokens and turns.
    """

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Raise `UsageError`: an episode alone has nothing to be compared with."""
        raise no_group(self)

    @abstractmethod
    async def score_group(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Score]:
        """Score the episodes of one task, in their order; must not change them."""


def no_group(scorer: Scorer) -> UsageError:
    """Make the error of an episode that is not played in a group."""
    return UsageError(
        f"{type(scorer).__name__} compares the episodes of a group, and this episode is played alone",
        expected="at least 2 episodes of the same task: algorithm.group_size in training, samples in evaluations",
        hint="agent.judge=null leaves out the judge where rewards are not needed, such as in agentrl sft",
    )


class EnvironmentReward(Scorer):
    """The sum of the rewards that the environment gave: the default."""

    @property
    def definitions(self) -> Mapping[str, SourceLocation | None]:
        """No places: the environment alone decides."""
        return {}

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Sum of the turns' rewards."""
        return Score(reward=trajectory.environment_reward)


async def checked_score(scorer: Scorer, trajectory: Trajectory, task: Task) -> Score:
    """Score an episode, and check what the scorer returned.

    Raises:
        RewardFailure: it raised, or returned no `Score` of finite numbers.
    """
    place = defined_in(scorer)
    what = f"{with_location(type(scorer).__name__, place)} on task {task.id}"
    with failures_named(what, place, subject=type(scorer).__name__):
        score = await scorer.score(trajectory, task)
    return _checked(score, what, scorer, trajectory)


async def checked_group_scores(scorer: GroupScorer, trajectories: Sequence[Trajectory], task: Task) -> list[Score]:
    """Score the episodes of a group, and check what the scorer returned.

    Raises:
        RewardFailure: it raised, or returned anything but one `Score` of finite numbers for each episode.
    """
    place = defined_in(scorer)
    what = f"{with_location(type(scorer).__name__, place)} on task {task.id}"
    with failures_named(what, place, subject=type(scorer).__name__):
        scores = list(await scorer.score_group(trajectories, task))
        if len(scores) != len(trajectories):
            raise RewardFailure(f"{what} did not score each episode", got=len(scores), expected=len(trajectories))
    return [_checked(score, what, scorer, of) for score, of in zip(scores, trajectories, strict=True)]


def _checked(score: Score, what: str, scorer: Scorer, trajectory: Trajectory) -> Score:
    if not isinstance(score, Score):
        raise _located(
            RewardFailure(
                f"{what} did not return a score",
                got=f"{type(score).__name__} {shortened(score)}",
                expected="agentrl.reward.Score(reward=…)",
            ),
            defined_in(scorer),
            type(scorer).__name__,
        )
    given = {} if score.reward is None else {"reward": score.reward}
    for name, value in {**given, **score.components}.items():
        if bounded_reward(value) is None:
            environment = trajectory.environment
            raise _located(
                RewardFailure(
                    f"{what} gave a {name} that is no reward",
                    got=f"{type(value).__name__} {shortened(value)} (environment {environment})",
                    expected=f"{A_REWARD}, or None as the reward when nothing can be said",
                    hint=f"see agentrl env check {shlex.quote(environment)}"
                    if isinstance(scorer, EnvironmentReward)
                    else None,
                ),
                None if isinstance(scorer, EnvironmentReward) else defined_in(scorer),
                type(scorer).__name__,
            )
    return Score(
        reward=bounded_reward(score.reward),
        components={name: float(value) for name, value in score.components.items()},
    )


@contextmanager
def failures_named(what: str, definition: SourceLocation | None, *, subject: str) -> Iterator[None]:
    """Turn whatever a user's function raises into a failure that names it, and the line of its file.

    Args:
        what: What failed, for the message.
        definition: Of the function, where it is known.
        subject: Who failed, in words that do not differ from episode to episode.
    """
    try:
        yield
    except RewardFailure as failure:
        _located(failure, definition, subject)
        raise
    except (UsageError, InfrastructureError, BudgetSpent, asyncio.CancelledError):
        raise
    except BaseException as error:  # the user's code may raise anything; the trajectory records it
        if is_addressed_to(running_task(), error):
            raise
        file = None if definition is None else definition.file
        where = raised_in(error, file) or raised_in(error)
        own = RewardFailure(f"{what} failed", got=described_error(error), hint=where)
        own.place = raised_at(error, file)
        raise _located(own, definition, subject) from error


def _located(failure: RewardFailure, definition: SourceLocation | None, subject: str) -> RewardFailure:
    """Add whose failure it is, and where it is defined, as far as that is not known better."""
    failure.subject = failure.subject or subject
    failure.place = failure.place or definition
    return failure


def defined_in(function: Any) -> SourceLocation | None:
    """Find the line where a function, or the class of an object, is defined; ``None`` where it is not known."""
    target = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    found: Any = target if inspect.isclass(target) or hasattr(target, "__code__") else type(target)
    return _place(found)


@functools.lru_cache(maxsize=256)
def _place(target: Any) -> SourceLocation | None:
    if code := getattr(target, "__code__", None):
        return SourceLocation(code.co_filename, code.co_firstlineno)
    try:
        file, line = inspect.getsourcefile(target), inspect.getsourcelines(target)[1]
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # no file, or another one than was run
        return None
    return None if file is None else SourceLocation(file, line)


def as_number(value: Any) -> float | None:
    """Return a reward as a plain number (also of NumPy's types and one-element tensors); ``None`` for anything else."""
    item = getattr(value, "item", None)
    try:
        return bounded_reward(item() if callable(item) and not isinstance(value, numbers.Real) else value)
    except (ValueError, RuntimeError, TypeError):  # several elements
        return None
