"""Estimates and their intervals: what a measured success rate says about the true one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, variance

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and the interval in which the true mean lies with probability `CONFIDENCE`."""

    mean: float
    low: float
    high: float


def wilson_interval(successes: float, trials: float) -> Estimate:
    """Wilson's score interval for a proportion (Wilson 1927).

    Both arguments may be fractions: `clustered_success` asks with an effective number of trials.

    >>> estimate = wilson_interval(8, 10)
    >>> round(estimate.low, 3), round(estimate.high, 3)
    (0.49, 0.943)

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes of {trials} trials is not a proportion")
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    share = successes / trials
    spread = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z * z / trials
    centre = share + z * z / (2 * trials)
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == trials else (centre + spread) / scale
    return Estimate(mean=share, low=low, high=high)


def clustered_success(successes_by_task: Sequence[Sequence[bool]]) -> Estimate:
    """Success over all episodes, with a Wilson interval that counts samples of one task as what they are: related.

    With one sample per task this is Wilson's interval. With more, the number of trials is replaced by the effective
    one, ``p (1 - p) / (variance of the task means / number of tasks)`` (Kish 1965, the design effect), between the
    number of tasks and that of episodes.

    Args:
        successes_by_task: For each task its samples; tasks without samples are left out.

    Raises:
        ValueError: no samples at all.
    """
    tasks = [samples for samples in successes_by_task if samples]
    episodes = [solved for samples in tasks for solved in samples]
    if not episodes:
        raise ValueError("no finished episode: nothing to estimate")
    share = fmean(episodes)
    trials = _effective_trials(tasks, share, len(episodes))
    estimate = wilson_interval(share * trials, trials)
    return replace(estimate, mean=share)


def _effective_trials(tasks: Sequence[Sequence[bool]], share: float, episodes: int) -> float:
    if len(tasks) in (1, episodes) or share in (0.0, 1.0):
        return len(tasks)  # one sample each, or nothing from which the agreement within tasks could be told
    between = variance([fmean(samples) for samples in tasks]) / len(tasks)
    if between == 0:
        return episodes
    return min(max(share * (1 - share) / between, len(tasks)), episodes)


def bootstrap_mean(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """Mean with a percentile bootstrap interval (Efron 1979): for quantities that are not proportions.

    Args:
        values: One value per independent unit (the mean of a task's samples, not the samples).
        seed: Seed of the resampling.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values: nothing to estimate")
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(data), size=(RESAMPLES, len(data)))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(data[picks].mean(axis=1), [tail, 100 - tail])
    return Estimate(mean=float(data.mean()), low=float(low), high=float(high))


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Probability that at least one of `k` samples solves the task, unbiased (Chen et al. 2021, eq. 1).

    >>> pass_at_k(4, 1, 2)
    0.5

    Raises:
        ValueError: `k` is not in 1 to `samples`.
    """
    _check_k(samples, successes, k)
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def pass_hat_k(samples: int, successes: int, k: int) -> float:
    """Probability that all of `k` samples solve the task, unbiased (pass^k; Yao et al. 2024, tau-bench).

    >>> pass_hat_k(4, 3, 2)
    0.5

    Raises:
        ValueError: `k` is not in 1 to `samples`.
    """
    _check_k(samples, successes, k)
    return math.comb(successes, k) / math.comb(samples, k)


def _check_k(samples: int, successes: int, k: int) -> None:
    if not 0 <= successes <= samples or not 1 <= k <= samples:
        raise ValueError(f"k = {k} with {successes} successes of {samples} samples")
