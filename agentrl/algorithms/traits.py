"""Traits of estimators and losses that the trainer uses, declared where a function is defined."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Marked = TypeVar("Marked", bound=Callable[..., Any])


class Input(enum.StrEnum):
    """Optional input of a step; the value describes it in messages."""

    VALUES = "a critic's values"
    GREEDY_RETURN = "a greedy rollout of each task"
    BASELINE = "a running baseline"
    COMPONENTS = "named reward components"
    ROLE_KIND = "the role and the type of task of each episode"
    PROCESS_REWARD = "the rewards of an implicit process reward model"
    SCORE_NORM = "the norm of the policy's score at each token"
    REFERENCE = "a reference policy"
    TEACHER = "a teacher's log-probabilities"
    TEACHER_TOP = "a teacher's most probable tokens"
    EXPERT = "episodes of an expert"
    ENTROPY = "the entropy at each token"
    TURN = "the turn of each token"
    EPISODE = "the episode of each token"
    GROUP = "the group of each token"


@dataclass(frozen=True, slots=True)
class TokenSelector:
    """Selection of a loss among all tokens of an update, made before the loss is computed."""

    choose: Callable[..., Any]
    """Function from a `LossInput` of the whole update to [tokens], bool, or (without `drops`) to numbers, [tokens] or
    [tokens, n]; its options are a subset of the loss's."""
    drops: bool
    """True if tokens that are not selected are dropped from the loss and its denominators; the selection must then not
    depend on the current policy."""


@dataclass(frozen=True, slots=True)
class Trait:
    """A mark on functions: used as a decorator, and read with `of`."""

    name: str

    def __call__(self, function: Marked) -> Marked:
        """Mark a function."""
        function.__dict__[self.name] = True
        return function

    def of(self, function: Callable[..., Any]) -> bool:
        """Return True if a function has the mark."""
        return getattr(function, self.name, False)


compares_group = Trait("compares_group")
"""Mark of an estimator that needs at least two members in a group; the trainer skips and counts groups of one."""
couples_episodes = Trait("couples_episodes")
"""Mark of a loss that compares the episodes of a group, all of which must be in the same update."""
uses_branches = Trait("uses_branches")
"""Mark of an estimator that compares episodes which branch from one another (``agent.branch``) at their forks."""
advantage_weighted = Trait("advantage_weighted")
"""Mark of a loss that is 0, with gradient 0, where the advantage is 0; the trainer may skip such sequences."""
ignores_advantage = Trait("ignores_advantage")
"""Mark of a loss that does not read advantages, so that an estimator's options would be ignored."""
reads_policy = Trait("reads_policy")
"""Mark of a filter that needs the current policy, and so a forward pass from a step's second update on."""
weighs_behaviour = Trait("weighs_behaviour")
"""Mark of a loss that already contains the weight pi_old / mu, so that a correction would apply it twice."""


def _mark(name: str, value: object) -> Callable[[Marked], Marked]:
    def mark(function: Marked) -> Marked:
        function.__dict__[name] = value
        return function

    return mark


def needs(*inputs: Input) -> Callable[[Marked], Marked]:
    """Mark a function with the optional inputs that it needs."""
    return _mark("needs", frozenset(inputs))


def needed_inputs(function: Callable[..., Any]) -> frozenset[Input]:
    """Return the optional inputs that a function needs."""
    return getattr(function, "needs", frozenset())


def tracks(tracker: Callable[..., Any]) -> Callable[[Marked], Marked]:
    """Mark an estimator with running baselines, kept by a tracker class; see `agentrl.algorithms.running_baselines`."""
    return _mark("tracker", tracker)


def tracker_of(estimator: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the tracker class of an estimator that was marked with `tracks`."""
    return getattr(estimator, "tracker", None)


def chooses(choose: Callable[..., Any], *, drops: bool) -> Callable[[Marked], Marked]:
    """Mark a loss that chooses among all tokens of an update; see `TokenSelector`."""
    return _mark("choice", TokenSelector(choose, drops))


def choice_of(loss: Callable[..., Any]) -> TokenSelector | None:
    """Return the choice of a loss that was marked with `chooses`."""
    return getattr(loss, "choice", None)


def takes(what: str) -> Callable[[Marked], Marked]:
    """Mark a loss that takes another input than a `LossInput`; `what` describes it in messages."""
    return _mark("takes", what)


def other_input(loss: Callable[..., Any]) -> str | None:
    """Return the description of a loss's input if it is not a `LossInput`."""
    return getattr(loss, "takes", None)
