"""Traits that a trainer may assume of an estimator or a loss, declared where the function is defined."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Marked = TypeVar("Marked", bound=Callable[..., Any])


class Input(enum.StrEnum):
    """Input that a step has only where something provides it; the value is its name in messages."""

    VALUES = "a critic's values"
    GREEDY_RETURN = "a greedy rollout of each task"
    COMPONENTS = "named reward components"
    PROCESS_REWARD = "the rewards of an implicit process reward model"
    REFERENCE = "a reference policy"
    TEACHER = "a teacher's log-probabilities"
    TEACHER_TOP = "a teacher's most probable tokens"
    EXPERT = "episodes of an expert"
    ENTROPY = "the entropy at each token"


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice of a loss among all tokens of an update, before it is computed."""

    choose: Callable[..., Any]
    """Bool [tokens] from a `LossInput` of the whole update; its options are some of the loss's."""
    drops: bool
    """What is not chosen leaves the loss and its denominators. The choice then reads no current policy."""


def compares_group(estimator: Marked) -> Marked:
    """Mark an estimator that needs two members in a group; the trainer leaves out and counts groups of one."""
    estimator.__dict__["compares_group"] = True
    return estimator


def requires_group(estimator: Callable[..., Any]) -> bool:
    """Return True if an estimator was marked with `compares_group`."""
    return getattr(estimator, "compares_group", False)


def advantage_weighted(loss: Marked) -> Marked:
    """Mark a loss that is 0, with gradient 0, where the advantage is; the trainer may then skip such sequences."""
    loss.__dict__["advantage_weighted"] = True
    return loss


def is_advantage_weighted(loss: Callable[..., Any]) -> bool:
    """Return True if a loss was marked with `advantage_weighted`."""
    return getattr(loss, "advantage_weighted", False)


def ignores_advantage(loss: Marked) -> Marked:
    """Mark a loss that reads no advantage, so that an estimator's options would be ignored."""
    loss.__dict__["ignores_advantage"] = True
    return loss


def is_blind_to_advantage(loss: Callable[..., Any]) -> bool:
    """Return True if a loss was marked with `ignores_advantage`."""
    return getattr(loss, "ignores_advantage", False)


def averages_sequences(loss: Marked) -> Marked:
    """Mark a loss that is a mean over sequences in its paper: ``seq-mean-token-mean`` is its default aggregation."""
    loss.__dict__["averages_sequences"] = True
    return loss


def is_mean_of_sequences(loss: Callable[..., Any]) -> bool:
    """Return True if a loss was marked with `averages_sequences`."""
    return getattr(loss, "averages_sequences", False)


def weighs_behaviour(loss: Marked) -> Marked:
    """Mark a loss that holds the weight pi_old / mu itself, so that a correction would apply it twice."""
    loss.__dict__["weighs_behaviour"] = True
    return loss


def corrects_itself(loss: Callable[..., Any]) -> bool:
    """Return True if a loss was marked with `weighs_behaviour`."""
    return getattr(loss, "weighs_behaviour", False)


def needs(*inputs: Input) -> Callable[[Marked], Marked]:
    """Mark a function that cannot do without optional parts of its input."""

    def mark(function: Marked) -> Marked:
        function.__dict__["needs"] = frozenset(inputs)
        return function

    return mark


def needed_inputs(function: Callable[..., Any]) -> frozenset[Input]:
    """Return the inputs that a function was marked with `needs` for."""
    return getattr(function, "needs", frozenset())


def chooses(choose: Callable[..., Any], *, drops: bool) -> Callable[[Marked], Marked]:
    """Mark a loss that chooses among all tokens of an update; see `Choice`."""

    def mark(loss: Marked) -> Marked:
        loss.__dict__["choice"] = Choice(choose, drops)
        return loss

    return mark


def choice_of(loss: Callable[..., Any]) -> Choice | None:
    """Return the choice of a loss that was marked with `chooses`."""
    return getattr(loss, "choice", None)


def takes(what: str) -> Callable[[Marked], Marked]:
    """Mark a loss that is no function of a `LossInput`: of what, in words."""

    def mark(loss: Marked) -> Marked:
        loss.__dict__["takes"] = what
        return loss

    return mark


def other_input(loss: Callable[..., Any]) -> str | None:
    """Return what a loss takes instead of a `LossInput`, if it was marked with `takes`."""
    return getattr(loss, "takes", None)
