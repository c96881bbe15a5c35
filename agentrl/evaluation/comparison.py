"""Paired comparison of two evaluations over the tasks that both played."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from agentrl.evaluation.panel import EvaluatedEpisode
from agentrl.evaluation.result import MeanInterval, bootstrap_mean

PERMUTATIONS = 20_000
MOST_EXACT = 16
"""Maximum number of differing tasks for which all sign changes are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Difference of two evaluations on their common tasks.

    Example: ``Comparison(n_tasks=40, difference=MeanInterval(mean=0.2, low=0.05, high=0.35), p_value=0.02, won=("t-3",
    …), lost=("t-9",), tied=29)``: the second one solves 20 % more of the tasks.
    """

    n_tasks: int
    difference: MeanInterval
    """Mean success of the second less that of the first, over tasks, with a bootstrap interval over tasks."""
    p_value: float
    """Probability of such a difference if both policies were equally good: two-sided sign-flip permutation test."""
    won: tuple[str, ...]
    """Tasks that the second one solves more often."""
    lost: tuple[str, ...]
    tied: int

    @property
    def is_certain(self) -> bool:
        """True if chance explains the difference in fewer than 5 % of the cases."""
        return self.p_value < 0.05

    def __str__(self) -> str:
        counts = f"{len(self.won)} won, {len(self.lost)} lost, {self.tied} tied"
        return f"{self.difference_text} on {self.n_tasks} common tasks: {counts}, p = {self.p_value:.2g}"

    @property
    def difference_text(self) -> str:
        """The difference with its interval, in per cent."""
        found = self.difference
        return f"{found.mean:+.1%} ({100 * found.low:+.1f} to {100 * found.high:+.1f})".replace("%", " %")


def compare(first: Sequence[EvaluatedEpisode], second: Sequence[EvaluatedEpisode]) -> Comparison | None:
    """Compare two evaluations task by task; ``None`` if no task has known successes in both.

    Episodes with infrastructure failures do not count. Tasks of the same id with different content are different tasks.
    """
    before, after = _success_by_task(first), _success_by_task(second)
    common = sorted(before.keys() & after.keys())
    if not common:
        return None
    differences = [after[task] - before[task] for task in common]
    return Comparison(
        n_tasks=len(common),
        difference=bootstrap_mean(differences),
        p_value=sign_flip_test(differences),
        won=tuple(task for (task, _), change in zip(common, differences, strict=True) if change > 0),
        lost=tuple(task for (task, _), change in zip(common, differences, strict=True) if change < 0),
        tied=sum(change == 0 for change in differences),
    )


def _success_by_task(episodes: Sequence[EvaluatedEpisode]) -> dict[tuple[str, str], float]:
    """Return the mean success of the samples by id and content of the task."""
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for episode in episodes:
        if episode.is_measured and episode.trajectory.success is not None:
            found[episode.task_id, episode.task].append(episode.trajectory.success)
    return {task: fmean(solved) for task, solved in found.items()}


def sign_flip_test(differences: Sequence[float], *, seed: int = 0) -> float:
    """Return the two-sided p-value of a paired permutation test (Fisher 1935): the mean under random signs.

    For single samples this is McNemar's exact test. Few differing tasks are counted exactly.

    >>> sign_flip_test([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])  # 2 of 32 sign changes are as extreme
    0.0625
    """
    differing = np.asarray([value for value in differences if value], dtype=np.float64)
    if not differing.size:
        return 1.0
    observed = abs(differing.sum()) - 1e-12
    if differing.size <= MOST_EXACT:
        signs = _all_signs(differing.size)
        return float((np.abs(signs @ differing) >= observed).mean())
    generator = np.random.default_rng(seed)
    hits = 0
    for _ in range(math.ceil(PERMUTATIONS / 1000)):  # in parts, as thousands of tasks would fill the memory
        signs = generator.choice([-1.0, 1.0], size=(1000, differing.size))
        hits += int((np.abs(signs @ differing) >= observed).sum())
    return (hits + 1) / (math.ceil(PERMUTATIONS / 1000) * 1000 + 1)


def _all_signs(count: int) -> npt.NDArray[np.float64]:
    """Return all sign changes: [2 ** count, count]."""
    bits = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    return np.where(bits == 1, 1.0, -1.0)
