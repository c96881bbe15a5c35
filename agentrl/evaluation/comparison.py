"""Comparison of two runs or evaluations over the tasks that both have played, with a paired test."""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from agentrl.evaluation.panel import EvaluatedEpisode
from agentrl.evaluation.result import MeanInterval, bootstrap_mean
from agentrl.observe.metrics import MARGIN_ERRORS
from agentrl.trajectory import Trajectory

MAX_BOOTSTRAPPED = 2000
"""Number of tasks up to which the interval of a difference is bootstrapped; the normal one is the same for more."""


class Verdict(enum.StrEnum):
    """Result of a task, seen from the second side."""

    WON = "won"
    """The second side did better."""
    LOST = "lost"
    SAME = "same"


class PanelMatch(enum.StrEnum):
    """Comparison of the tasks, samples and seeds of two evaluations."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


def compare_panels(first: str | None, second: str | None) -> PanelMatch:
    """Compare the panel hashes of two evaluations; ``None`` for runs, and results of earlier versions."""
    if first is None or second is None:
        return PanelMatch.UNKNOWN
    return PanelMatch.SAME if first == second else PanelMatch.DIFFERENT


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """Episodes of one side for one task."""

    episodes: int
    success: float | None
    """Share of solved episodes; ``None`` if unknown."""
    reward: float | None
    """Mean reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTask:
    """A task that both sides have played."""

    first: TaskScore
    second: TaskScore
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """Two-sided test of the hypothesis that neither side is better.

    Example: of 20 tasks with one episode each, the second side solves 6 that the first does not, and misses 1 that it
    does: ``name="exact McNemar", p=0.125, difference=0.25``.
    """

    name: str
    p: float
    """Probability of a difference as large by chance."""
    difference: float
    """Mean over the tasks of the second side's success (or reward) minus the first side's."""
    low: float
    high: float
    """Interval of the difference, at 95 %; NaN if all tasks have the same difference."""
    measure: str
    """Compared quantity: ``success`` or ``reward``."""

    def __str__(self) -> str:
        """Format the difference with its interval, in per cent for success."""
        if math.isnan(self.low):
            difference = f"{self.difference:+.3f}" if self.measure != "success" else f"{100 * self.difference:+.1f} %"
            return f"{difference} on each task"
        if self.measure != "success":
            return f"{self.difference:+.3f} ({self.low:+.3f} to {self.high:+.3f})"
        return f"{100 * self.difference:+.1f} % ({100 * self.low:+.1f} to {100 * self.high:+.1f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """Comparison of two sides, task by task."""

    tasks: Mapping[Hashable, ComparedTask]
    """Tasks of both sides."""
    only_first: int
    """Number of tasks that only the first side has played."""
    only_second: int
    test: PairedTest | None
    """``None`` without a common task whose results are known."""

    def count(self, verdict: Verdict) -> int:
        """Return the number of tasks with a verdict."""
        return sum(task.verdict is verdict for task in self.tasks.values())


def evaluation_scores(episodes: Iterable[EvaluatedEpisode]) -> dict[Hashable, TaskScore]:
    """Return the scores of an evaluation by the id and content of its tasks, without infrastructure failures.

    As in its result, episodes without success have failed if others report it.
    """
    found: dict[Hashable, list[Trajectory]] = {}
    for episode in episodes:
        if episode.is_measured:
            found.setdefault((episode.task_id, episode.task), []).append(episode.trajectory)
    is_known = any(one.success is not None for samples in found.values() for one in samples)
    return {
        task: TaskScore(
            episodes=len(samples),
            success=fmean(bool(one.success) for one in samples) if is_known else None,
            reward=_mean([one.reward for one in samples if one.reward is not None]),
        )
        for task, samples in found.items()
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def compare(first: Mapping[Hashable, TaskScore], second: Mapping[Hashable, TaskScore]) -> PairedComparison:
    """Compare two sides, task by task: by success where both know it, otherwise by reward."""
    common = [key for key in first if key in second]
    tasks = {
        key: ComparedTask(first=first[key], second=second[key], verdict=_verdict(first[key], second[key]))
        for key in common
    }
    by_success = [(one.first.success, one.second.success) for one in tasks.values()]
    by_reward = [(one.first.reward, one.second.reward) for one in tasks.values()]
    success = [(a, b) for a, b in by_success if a is not None and b is not None]
    reward = [(a, b) for a, b in by_reward if a is not None and b is not None]
    uses_success = bool(success) and len(success) >= len(reward)
    pairs = success if uses_success else reward
    return PairedComparison(
        tasks=tasks,
        only_first=len(first) - len(common),
        only_second=len(second) - len(common),
        test=paired_test(pairs, "success" if uses_success else "reward") if pairs else None,
    )


def paired_test(pairs: Sequence[tuple[float, float]], measure: str = "success") -> PairedTest:
    """Test whether one side is better, by the tasks whose two values differ.

    The sign test; for one episode of each task it is the exact test of McNemar (1947). The interval is that of the mean
    difference: a percentile bootstrap over tasks, or the normal one of many tasks.

    >>> test = paired_test([(0.0, 1.0)] * 6 + [(1.0, 0.0)] + [(1.0, 1.0)] * 13)
    >>> test.name, test.p, test.difference
    ('exact McNemar', 0.125, 0.25)

    Raises:
        ValueError: no pairs.
    """
    if not pairs:
        raise ValueError("no task that both have played: nothing to test")
    differences = [b - a for a, b in pairs]
    won, lost = sum(one > 0 for one in differences), sum(one < 0 for one in differences)
    is_binary = measure == "success" and all(value in (0.0, 1.0) for pair in pairs for value in pair)
    interval = _interval(differences)
    return PairedTest(
        name="exact McNemar" if is_binary else "sign test",
        p=sign_test(won, lost),
        difference=interval.mean,
        low=interval.low,
        high=interval.high,
        measure=measure,
    )


def sign_test(won: int, lost: int) -> float:
    """Return the two-sided probability of a split at least as uneven, if both sides win with probability 1/2.

    >>> sign_test(6, 1), sign_test(0, 0), sign_test(3, 3)
    (0.125, 1.0, 1.0)
    """
    n, fewer = won + lost, min(won, lost)
    if 2 * fewer >= n - 1:
        return 1.0
    k = np.arange(1, fewer + 1, dtype=np.float64)
    logs = np.concatenate([[0.0], np.cumsum(np.log((n - k + 1) / k))]) - n * math.log(2)
    return min(1.0, round(2 * float(np.exp(logs).sum()), 12))


def _verdict(first: TaskScore, second: TaskScore) -> Verdict:
    known = first.success is not None and second.success is not None
    a, b = (first.success, second.success) if known else (first.reward, second.reward)
    if a is None or b is None or a == b:
        return Verdict.SAME
    return Verdict.WON if b > a else Verdict.LOST


def _interval(differences: Sequence[float]) -> MeanInterval:
    if len(differences) <= MAX_BOOTSTRAPPED or min(differences) == max(differences):
        return bootstrap_mean(differences)
    mean = fmean(differences)
    margin = MARGIN_ERRORS * stdev(differences, mean) / math.sqrt(len(differences))
    return MeanInterval(mean=mean, low=mean - margin, high=mean + margin)
