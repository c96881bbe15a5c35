"""Work shared out over ranks: equal in number, so that all meet in the same collectives, and nearly equal in cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from agentrl.training.micro_batch_gradients import MicroBatch


def share_of(work: Sequence[MicroBatch], *, rank: int, ranks: int) -> list[MicroBatch]:
    """The micro-batches of one rank, those that learn first, each kind by falling cost.

    Every rank gets as many of each kind as every other one. Where the numbers do not come out even, micro-batches are
    split; where there is nothing to split, the cheapest is computed once more without counting.

    Args:
        work: All micro-batches, the same on every rank.
        rank: Whose share.
        ranks: How many ranks there are.
    """
    if ranks == 1:
        return list(work)
    share: list[MicroBatch] = []
    for learns in (True, False):
        even = [micro_batch for micro_batch in evened(work, ranks) if micro_batch.learns == learns]
        own = balanced([micro_batch.cost for micro_batch in even], ranks)[rank] if even else []
        share += sorted((even[index] for index in own), key=lambda micro_batch: -micro_batch.cost)
    return share


def evened(work: Sequence[MicroBatch], ranks: int) -> list[MicroBatch]:
    """The micro-batches that `share_of` shares out: those that learn first."""
    kinds = ([micro_batch for micro_batch in work if micro_batch.learns == learns] for learns in (True, False))
    return [micro_batch for kind in kinds for micro_batch in _even(kind, ranks)] if ranks > 1 else list(work)


def _even(work: Sequence[MicroBatch], ranks: int) -> list[MicroBatch]:
    """As many micro-batches as the ranks can share evenly."""
    even = list(work)
    while len(even) % ranks:
        large = [index for index, micro_batch in enumerate(even) if len(micro_batch.sequences) > 1]
        if not large:
            spare = replace(min(even, key=lambda micro_batch: micro_batch.cost), counts=False)
            return even + [spare] * (-len(even) % ranks)
        even += _halves(even.pop(max(large, key=lambda index: even[index].cost)))
    return even


def _halves(micro_batch: MicroBatch) -> list[MicroBatch]:
    middle = len(micro_batch.sequences) // 2
    parts = micro_batch.sequences[:middle], micro_batch.sequences[middle:]
    shares = [(part, len(part) / len(micro_batch.sequences)) for part in parts]
    return [
        replace(
            micro_batch,
            sequences=part,
            tokens=round(micro_batch.tokens * share),
            cost=round(micro_batch.cost * share),
        )
        for part, share in shares
    ]


def balanced(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Items in parts of equal numbers and nearly equal sums: the differencing of Karmarkar and Karp (1982).

    >>> balanced([8, 7, 6, 5, 4, 2], parts=2)
    [[0, 2, 5], [1, 3, 4]]

    Args:
        costs: A multiple of `parts` of them.
        parts: How many.
    """
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    rows = [[(costs[index], [index]) for index in order[low : low + parts]] for low in range(0, len(order), parts)]
    heap = [(_spread(row), number, row) for number, row in enumerate(rows)]
    heapq.heapify(heap)
    while len(heap) > 1:  # what differs most is evened out first: the dearest of one with the cheapest of the other
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        pairs = zip(first, reversed(second), strict=True)
        merged = sorted(((a + b, own + others) for (a, own), (b, others) in pairs), key=lambda part: -part[0])
        heapq.heappush(heap, (_spread(merged), number, merged))
    return sorted(sorted(items) for _, items in heap[0][2])


def _spread(row: Sequence[tuple[int, list[int]]]) -> int:
    """Negative difference of the dearest and the cheapest part, which a heap gives largest first."""
    return row[-1][0] - row[0][0]
