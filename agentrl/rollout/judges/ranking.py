"""Ranking of a group by comparing pairs in both orders or lists in several orders; rewards are between 0 and 1.

Position bias cancels, because each pair is shown in both orders and each list in shuffled orders. Episodes with equal
transcripts get equal rewards and are not compared with each other.

- Pairwise, every pair: the win rate, r_i = mean over j != i of s_ij, where s_ij is the mean of both orders' results, 1
  for a win, 0.5 for a tie, 0 for a loss.
- Pairwise, some pairs: strengths p_i of the Bradley-Terry model, P(i beats j) = p_i / (p_i + p_j), fitted to the pairs
  by Hunter's minorisation (2004, equation 3) with a weak prior; r_i = mean over j != i of p_i / (p_i + p_j).
- Listwise: r_i = mean over rounds of (n - place_i) / (n - 1), with place 1 for the best of n different episodes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentrl.rollout.judges.client import JudgeClient
from agentrl.rollout.judges.forms import FieldsForm, RankingForm, VerdictField
from agentrl.rollout.judges.transcripts import TranscriptPiece
from agentrl.rollout.tools import gather_in_order

Attempt: TypeAlias = tuple[TranscriptPiece, ...]
Pair: TypeAlias = tuple[int, int]
TIE = 0.5
RESULT = {"1": 1.0, "2": 0.0, "tie": TIE}
PRIOR = 0.1
"""Prior wins and losses of each episode against an imaginary one of strength 1, which keep all strengths finite."""
ITERATIONS = 500
ROUNDS = 3
"""Default number of listwise comparisons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupQuestion:
    """Question to a judge that shows several attempts at one task."""

    client: JudgeClient
    question: Callable[[Sequence[Attempt]], str]
    """Function that returns the question about attempts in the given order."""
    reason: VerdictField | None
    """Field of the judge's reasons, which precede its decision; ``None`` without reasons."""
    name: str
    """Id of the group, for messages; it also seeds the orders."""


async def pairwise(comparison: GroupQuestion, attempts: Sequence[Attempt], *, opponents: int | None) -> list[float]:
    """Compare attempts two at a time, each pair in both orders.

    Args:
        comparison: Question about the attempts.
        attempts: At least two attempts.
        opponents: Number of opponents of each attempt, an even number; all others by default.
    """
    count = len(attempts)
    pairs = pairs_of(count, opponents, seed=comparison.name)
    results = await gather_in_order([_result(comparison, attempts[i], attempts[j]) for i, j in pairs])
    found = dict(zip(pairs, results, strict=True))
    if len(pairs) == count * (count - 1) // 2:
        return win_rates(found, count)
    return bradley_terry(found, count)


async def _result(comparison: GroupQuestion, first: Attempt, second: Attempt) -> float:
    """Return the mean over both orders of the first attempt's result: 1 for a win, 0.5 for a tie, 0 for a loss."""
    if first == second:
        return TIE
    reason = [] if comparison.reason is None else [comparison.reason]
    better = VerdictField(
        name="better", kind="string", choices=tuple(RESULT), meaning="the number of the better attempt"
    )
    form = FieldsForm([*reason, better])
    orders = ((first, second), (second, first))
    answers = await gather_in_order(
        [comparison.client.ask(comparison.question(order), form, comparison.name) for order in orders]
    )
    forward, backward = (RESULT[answer["better"]] for answer in answers)
    counters = comparison.client.counters
    counters.judge_pairs += 1
    counters.judge_agreeing += forward == 1 - backward
    return (forward + 1 - backward) / 2


def pairs_of(count: int, opponents: int | None, *, seed: str) -> list[Pair]:
    """Return the pairs to compare: all, or those of neighbours on a shuffled circle with `opponents` for each attempt.

    >>> pairs_of(3, None, seed="")
    [(0, 1), (0, 2), (1, 2)]
    >>> from collections import Counter
    >>> sorted(Counter(i for pair in pairs_of(5, 2, seed="g") for i in pair).values())
    [2, 2, 2, 2, 2]
    """
    if opponents is None or opponents >= count - 1:
        return [(i, j) for i in range(count) for j in range(i + 1, count)]
    circle = list(range(count))
    random.Random(f"opponents/{seed}").shuffle(circle)
    return [
        (circle[i], circle[(i + distance) % count]) for i in range(count) for distance in range(1, opponents // 2 + 1)
    ]


def win_rates(results: Mapping[Pair, float], count: int) -> list[float]:
    """Return the mean result of each attempt against all others.

    >>> win_rates({(0, 1): 1.0, (0, 2): 0.5, (1, 2): 0.0}, 3)
    [0.75, 0.0, 0.75]
    """
    won = [0.0] * count
    for (i, j), result in results.items():
        won[i] += result
        won[j] += 1 - result
    return [value / (count - 1) for value in won]


def bradley_terry(results: Mapping[Pair, float], count: int) -> list[float]:
    """Return the expected win rate of each attempt against all others, from strengths fitted to the compared pairs."""
    met: list[list[int]] = [[] for _ in range(count)]
    won = [PRIOR] * count
    for (i, j), result in results.items():
        met[i].append(j)
        met[j].append(i)
        won[i] += result
        won[j] += 1 - result
    strength = [1.0] * count
    for _ in range(ITERATIONS):
        strength = [
            won[i] / math.fsum([2 * PRIOR / (strength[i] + 1), *(1 / (strength[i] + strength[j]) for j in met[i])])
            for i in range(count)
        ]
    return [
        math.fsum(strength[i] / (strength[i] + strength[j]) for j in range(count) if j != i) / (count - 1)
        for i in range(count)
    ]


async def listwise(comparison: GroupQuestion, attempts: Sequence[Attempt], *, rounds: int) -> list[float]:
    """Rank all attempts at once, in a new order each round.

    Args:
        comparison: Question about the attempts.
        attempts: At least two attempts.
        rounds: Number of rankings that are averaged.
    """
    different = list(dict.fromkeys(attempts))
    if len(different) == 1:
        return [TIE] * len(attempts)
    found = await gather_in_order([_ranking(comparison, different, number) for number in range(rounds)])
    means = {attempt: math.fsum(ranks[attempt] for ranks in found) / rounds for attempt in different}
    return [means[attempt] for attempt in attempts]


async def _ranking(comparison: GroupQuestion, attempts: Sequence[Attempt], number: int) -> dict[Attempt, float]:
    shuffled = list(attempts)
    random.Random(f"round/{number}/{comparison.name}").shuffle(shuffled)
    count = len(shuffled)
    form = RankingForm(count, comparison.reason)
    answer = await comparison.client.ask(comparison.question(shuffled), form, comparison.name)
    return {shuffled[label - 1]: (count - place) / (count - 1) for place, label in enumerate(answer["ranking"], 1)}
