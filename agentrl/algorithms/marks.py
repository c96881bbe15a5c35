"""What a trainer may assume about an estimator or a loss, declared where the function is defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Marked = TypeVar("Marked", bound=Callable[..., Any])


def compares_group(estimator: Marked) -> Marked:
    """Mark an estimator that needs two members in a group; the trainer leaves out and counts groups of one."""
    estimator.__dict__["compares_group"] = True
    return estimator


def requires_group(estimator: Callable[..., Any]) -> bool:
    """Whether an estimator was marked with `compares_group`."""
    return getattr(estimator, "compares_group", False)


def advantage_weighted(loss: Marked) -> Marked:
    """Mark a loss that is 0, with gradient 0, where the advantage is; the trainer may then skip such tokens."""
    loss.__dict__["advantage_weighted"] = True
    return loss


def is_advantage_weighted(loss: Callable[..., Any]) -> bool:
    """Whether a loss was marked with `advantage_weighted`."""
    return getattr(loss, "advantage_weighted", False)
