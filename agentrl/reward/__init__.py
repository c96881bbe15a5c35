"""Scoring: computation of a finished episode's return."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import shlex
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.errors import (
    A_REWARD,
    InfrastructureError,
    ResumableError,
    RewardFailure,
    SourceLocation,
    UsageError,
    bounded_reward,
    described_error,
    is_addressed_to,
    raised_at,
    raised_in,
    running_task,
    shorten,
    with_location,
)
from agentrl.errors.foreign import CALL_GRACE_S, await_or_abandon
from agentrl.task import Task
from agentrl.trajectory import Trajectory

SCORER_GRACE_S = 2 * CALL_GRACE_S
"""Seconds for a cancelled scorer to end; it may itself wait for a function that is abandoned after half of them."""

ROUNDING = 1e-9
"""Maximum relative difference of rewards, as a share of the largest, that counts as rounding."""

MIN_DIFFERENCE = 1e-12
"""Maximum absolute difference of rewards that counts as rounding, after sums that cancel."""


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Return True if some rewards differ from the mean by more than rounding.

    >>> rewards_differ([0.3, 0.1 + 0.2]), rewards_differ([0.7, 0.7, 0.7]), rewards_differ([0.0, 1.0])
    (False, False, True)
    """
    if not rewards:
        return False
    mean = math.fsum(reward / len(rewards) for reward in rewards)
    bound = MIN_DIFFERENCE + ROUNDING * max(map(abs, rewards))
    return any(abs(reward - mean) > bound for reward in rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Result of a scorer."""

    reward: float | None
    """Return of the episode; ``None`` if it cannot be scored, so that it is not trained on."""
    components: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, float] = field(default_factory=dict)
    """Weighted amounts that add up to `reward`, by source; if empty, the scorer is its only source."""


class Scorer(ABC):
    """Scorer of finished episodes.

    An exception, or a reward that is not a finite number, fails the episode like a failure of its environment. Most
    rewards are plain functions instead: see docs/reward-functions.md.
    """

    @property
    def definitions(self) -> Mapping[str, SourceLocation | None]:
        """Locations of the reward code, by name; empty if only the environment gives rewards."""
        return {type(self).__name__: defined_in(self)}

    @abstractmethod
    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Score one episode; must not change the trajectory."""


class GroupScorer(Scorer):
    """Scorer that compares the finished episodes of a group.

    It is called once per group, after the last episode has ended and before advantages are computed. Episodes with
    infrastructure failures are excluded. The episodes' messages are no longer available: it reads tokens and turns.
    """

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Raise `UsageError`, because a single episode cannot be compared."""
        raise no_group(self)

    @abstractmethod
    async def score_group(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Score]:
        """Score the episodes of one task, in their order; must not change them."""


def no_group(scorer: Scorer) -> UsageError:
    """Return the error for an episode that is not played in a group."""
    return UsageError(
        f"{type(scorer).__name__} compares the episodes of a group, but this episode is not in a group",
        expected="at least 2 episodes of the same task: algorithm.group_size in training, samples in evaluations",
        hint="agent.judge=null removes the judge if rewards are not needed, such as in agentrl sft",
    )


class EnvironmentReward(Scorer):
    """Default scorer: the sum of the environment's rewards."""

    @property
    def definitions(self) -> Mapping[str, SourceLocation | None]:
        """No locations, because only the environment gives rewards."""
        return {}

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Return the sum of the turns' rewards."""
        return Score(reward=trajectory.environment_reward, sources=trajectory.environment_sources)


def with_role_rewards(score: Score, scorer: Scorer, own: Mapping[str, float]) -> Score:
    """Add the rewards that count only for single roles (`Trajectory.own_rewards`) to an episode's score."""
    if score.reward is None:
        return score
    by_role = {f"role/{role}": amount for role, amount in own.items()}
    sources = {**(score.sources or {type(scorer).__name__: score.reward}), **by_role}
    return replace(score, reward=score.reward + math.fsum(own.values()), sources=sources)


async def checked_score(scorer: Scorer, trajectory: Trajectory, task: Task) -> Score:
    """Score an episode, and check the result. The scorer gets a copy of the task, which it may change.

    Raises:
        RewardFailure: the scorer raised, or did not return a `Score` with finite numbers.
    """
    location = defined_in(scorer)
    what = f"{with_location(type(scorer).__name__, location)} on task {task.id}"
    with failures_named(what, location, subject=type(scorer).__name__):
        score = await await_or_abandon(scorer.score(trajectory, task.copy()), what, grace_s=SCORER_GRACE_S)
    return _check_score(score, what, scorer, trajectory)


async def checked_group_scores(scorer: GroupScorer, trajectories: Sequence[Trajectory], task: Task) -> list[Score]:
    """Score the episodes of a group, and check the results. The scorer gets a copy of the task, which it may change.

    Raises:
        RewardFailure: the scorer raised, or did not return one `Score` with finite numbers for each episode.
    """
    location = defined_in(scorer)
    what = f"{with_location(type(scorer).__name__, location)} on task {task.id}"
    with failures_named(what, location, subject=type(scorer).__name__):
        scores = list(
            await await_or_abandon(scorer.score_group(trajectories, task.copy()), what, grace_s=SCORER_GRACE_S)
        )
        if len(scores) != len(trajectories):
            raise RewardFailure(f"{what} did not score each episode", got=len(scores), expected=len(trajectories))
    return [_check_score(score, what, scorer, of) for score, of in zip(scores, trajectories, strict=True)]


def _check_score(score: Score, what: str, scorer: Scorer, trajectory: Trajectory) -> Score:
    if not isinstance(score, Score):
        raise _add_location(
            RewardFailure(
                f"{what} did not return a score",
                got=f"{type(score).__name__} {shorten(score)}",
                expected="agentrl.reward.Score(reward=…)",
            ),
            defined_in(scorer),
            type(scorer).__name__,
        )
    if not all(isinstance(name, str) for name in (*score.components, *score.sources)):
        raise _add_location(
            RewardFailure(
                f"{what} gave components without names", got=shorten(dict(score.components)), expected="numbers by name"
            ),
            defined_in(scorer),
            type(scorer).__name__,
        )
    given = {} if score.reward is None else {"reward": score.reward}
    for name, value in (*given.items(), *score.sources.items(), *score.components.items()):
        if bounded_reward(value) is None:
            environment = trajectory.environment
            raise _add_location(
                RewardFailure(
                    f"{what} gave an invalid {name}",
                    got=f"{type(value).__name__} {shorten(value)} (environment {environment})",
                    expected=f"{A_REWARD}, or None as the reward of an episode that cannot be scored",
                    hint=f"see agentrl env check {shlex.quote(environment)}"
                    if isinstance(scorer, EnvironmentReward)
                    else None,
                ),
                None if isinstance(scorer, EnvironmentReward) else defined_in(scorer),
                type(scorer).__name__,
            )
    return Score(
        reward=bounded_reward(score.reward), components=_plain(score.components), sources=_plain(score.sources)
    )


def _plain(amounts: Mapping[str, float]) -> dict[str, float]:
    return {str.__str__(name): bounded_reward(value) or 0.0 for name, value in amounts.items()}


def weighted(amounts: Mapping[str, float], weight: float) -> dict[str, float]:
    """Return the amounts of several sources, multiplied by a weight; without those that are 0."""
    return {source: weight * amount for source, amount in amounts.items() if weight * amount}


@contextmanager
def failures_named(what: str, definition: SourceLocation | None, *, subject: str) -> Iterator[None]:
    """Convert any exception of a user's function to a failure that names the function and the line.

    `what` describes the call in the message; `subject` names the function, the same for all episodes.
    """
    try:
        yield
    except RewardFailure as failure:
        _add_location(failure, definition, subject)
        raise
    except (UsageError, InfrastructureError, ResumableError, asyncio.CancelledError):
        raise
    except BaseException as error:  # the user's code may raise anything; the trajectory records it
        if is_addressed_to(running_task(), error):
            raise
        file = None if definition is None else definition.file
        where = raised_in(error, file) or raised_in(error)
        own = RewardFailure(f"{what} failed", got=described_error(error), hint=where)
        own.location = raised_at(error, file)
        raise _add_location(own, definition, subject) from error


def _add_location(failure: RewardFailure, definition: SourceLocation | None, subject: str) -> RewardFailure:
    """Set the subject and the location of a failure, if they are not set."""
    failure.subject = failure.subject or subject
    failure.location = failure.location or definition
    return failure


def defined_in(function: Any) -> SourceLocation | None:
    """Return the line that defines a function, or the class of an object; ``None`` if it is not known."""
    target = inspect.unwrap(function.func if isinstance(function, functools.partial) else function)
    found: Any = target if inspect.isclass(target) or hasattr(target, "__code__") else type(target)
    return _place(found)


@functools.lru_cache(maxsize=256)
def _place(target: Any) -> SourceLocation | None:
    if code := getattr(target, "__code__", None):
        return SourceLocation(code.co_filename, code.co_firstlineno)
    try:
        file, line = inspect.getsourcefile(target), inspect.getsourcelines(target)[1]
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # no file, or a file that has changed
        return None
    return None if file is None else SourceLocation(file, line)
