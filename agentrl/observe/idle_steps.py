"""Detection of steps that learn nothing, because all returns of each group are equal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

NONE = 1e-8
"""Mean absolute advantage below which advantages count as 0."""


def share_that_differs(metrics: Mapping[str, float]) -> float | None:
    """Return the share of a step's groups whose returns differ; ``None`` without groups."""
    trained, equal = metrics.get("groups/trained"), metrics.get("groups/zero_variance")
    return None if not trained or equal is None else 1 - equal / trained


def learns_nothing(metrics: Mapping[str, float]) -> bool:
    """Return True if a step's rewards provide no training signal.

    This holds if no group has a difference in returns, and the advantages are 0 or come only from a critic's error.
    """
    if share_that_differs(metrics) != 0:
        return False
    has_critic = any(name.startswith("critic/") for name in metrics)
    rewards_are_equal = math.isclose(metrics.get("reward/min", 0.0), metrics.get("reward/max", 1.0), abs_tol=NONE)
    return (metrics.get("train/advantage_abs_mean") or 0.0) < NONE or (has_critic and rewards_are_equal)


def steps_without_learning(lines: Iterable[Mapping[str, float]]) -> int:
    """Count the training steps in ``metrics.jsonl`` without learning."""
    return sum(learns_nothing(line) for line in lines)
