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
class TokenSelector:
    """Choice of a loss among all tokens of an update, before it is computed."""

    choose: Callable[..., Any]
    """[tokens] from a `LossInput` of the whole update, bool or (without `drops`) from 0 to 1; its options are some of
    the loss's."""
    drops: bool
    """What is not chosen leaves the loss and its denominators. The choice then reads no current policy."""


@dataclass(frozen=True, slots=True)
class Trait:
    """A mark on a function: decorate the function with it, and ask for it with `of`."""

    name: str

    def __call__(self, function: Marked) -> Marked:
        """Mark a function."""
        function.__dict__[self.name] = True
        return function

    def of(self, function: Callable[..., Any]) -> bool:
        """Return True if a function was marked."""
        return getattr(function, self.name, False)


compares_group = Trait("compares_group")
"""The estimator needs two members in a group; the trainer leaves out and counts groups of one."""
advantage_weighted = Trait("advantage_weighted")
"""The loss is 0, with gradient 0, where the advantage is; the trainer may then skip such sequences."""
ignores_advantage = Trait("ignores_advantage")
"""The loss reads no advantage, so that an estimator's options would be ignored."""
weighs_behaviour = Trait("weighs_behaviour")
"""The loss holds the weight pi_old / mu itself, so that a correction would apply it twice."""


def _mark(name: str, value: object) -> Callable[[Marked], Marked]:
    def mark(function: Marked) -> Marked:
        function.__dict__[name] = value
        return function

    return mark


def needs(*inputs: Input) -> Callable[[Marked], Marked]:
    """Mark a function that cannot do without optional parts of its input."""
    return _mark("needs", frozenset(inputs))


def needed_inputs(function: Callable[..., Any]) -> frozenset[Input]:
    """Return the inputs that a function was marked with `needs` for."""
    return getattr(function, "needs", frozenset())


def chooses(choose: Callable[..., Any], *, drops: bool) -> Callable[[Marked], Marked]:
    """Mark a loss that chooses among all tokens of an update; see `Choice`."""
    return _mark("choice", TokenSelector(choose, drops))


def choice_of(loss: Callable[..., Any]) -> TokenSelector | None:
    """Return the choice of a loss that was marked with `chooses`."""
    return getattr(loss, "choice", None)


def takes(what: str) -> Callable[[Marked], Marked]:
    """Mark a loss that is no function of a `LossInput`: of what, in words."""
    return _mark("takes", what)


def other_input(loss: Callable[..., Any]) -> str | None:
    """Return what a loss takes instead of a `LossInput`, if it was marked with `takes`."""
    return getattr(loss, "takes", None)
