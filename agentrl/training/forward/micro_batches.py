"""Plan of a pass: micro-batches of sequences, distributed over lanes and ranks at nearly equal cost.

Lanes are threads that compute in parallel (`agentrl.models.threads`). All ranks get the same number of micro-batches,
so that they call the same collectives.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.training.forward.layout import Layout
from agentrl.training.forward.sequences import ScoredSequence

BACKWARD_COST = 3
"""Cost of a forward and a backward pass, relative to a forward pass."""

ATTENTION_COSTS_AS_MUCH = 16_384
"""Length of a sequence at which attention costs as much as the rest of the model: about 12 times its width."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that go through the model together."""

    sequences: list[int]
    needs_grad: bool
    tokens: int
    """Number of tokens that go through the model, including padding."""
    cost: int
    counts: bool = True
    """True if its loss counts; False for a filler that lets this rank take part in the other ranks' collectives."""


def make_micro_batches(
    numbers: Sequence[int], sequences: Sequence[ScoredSequence], *, layout: Layout, workers: int, needs_grad: bool
) -> list[MicroBatch]:
    """Divide sequences, identified by `numbers`, into micro-batches; if possible, at least one for each worker."""
    passes = BACKWARD_COST if needs_grad else 1
    work = []
    for chosen in layout.for_workers(sequences, workers).micro_batches(sequences):
        part = [sequences[k] for k in chosen]
        tokens = layout.tokens(part)
        cost = forward_cost(tokens, layout.pairs(part)) * passes
        work.append(MicroBatch([numbers[k] for k in chosen], needs_grad, tokens, cost))
    return work


def forward_cost(tokens: int, pairs: int) -> int:
    """Estimate the cost of a forward pass, in tokens; that of attention grows with the number of pairs of tokens.

    >>> forward_cost(1000, 1000 * 500), forward_cost(16_384, 16_384 * 8192)
    (1061, 32768)
    """
    return tokens + 2 * pairs // ATTENTION_COSTS_AS_MUCH


def share_out(costs: Sequence[int], lanes: int) -> list[list[int]]:
    """Distribute work over lanes: the most expensive first, each to the lane with the least work.

    >>> share_out([1, 5, 3, 2], lanes=2)
    [[1, 0], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(max(1, min(lanes, len(costs))))]
    sums = [0] * len(shares)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = sums.index(min(sums))
        shares[least].append(index)
        sums[least] += costs[index]
    return shares


def rank_share(work: Sequence[MicroBatch], *, rank: int, ranks: int) -> list[MicroBatch]:
    """Return one rank's micro-batches: those that need gradients first, and by decreasing cost within each kind.

    Every rank gets the same number of each kind. Micro-batches are split to make the numbers even; if none can be
    split, the cheapest is computed again without counting.
    """
    if ranks == 1:
        return list(work)
    share: list[MicroBatch] = []
    for needs_grad in (True, False):
        even = [micro_batch for micro_batch in pad_to_ranks(work, ranks) if micro_batch.needs_grad == needs_grad]
        own = balance([micro_batch.cost for micro_batch in even], ranks)[rank] if even else []
        share += sorted((even[index] for index in own), key=lambda micro_batch: -micro_batch.cost)
    return share


def pad_to_ranks(work: Sequence[MicroBatch], ranks: int) -> list[MicroBatch]:
    """Make the number of micro-batches of each kind a multiple of `ranks`; those that need gradients come first."""
    kinds = ([micro_batch for micro_batch in work if micro_batch.needs_grad == kind] for kind in (True, False))
    return [micro_batch for kind in kinds for micro_batch in _even(kind, ranks)] if ranks > 1 else list(work)


def _even(work: Sequence[MicroBatch], ranks: int) -> list[MicroBatch]:
    """Split or repeat micro-batches until their number is a multiple of `ranks`."""
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
            micro_batch, sequences=part, tokens=round(micro_batch.tokens * share), cost=round(micro_batch.cost * share)
        )
        for part, share in shares
    ]


def balance(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Divide items into parts of equal size and nearly equal sums; differencing method of Karmarkar and Karp (1982).

    >>> balance([8, 7, 6, 5, 4, 2], parts=2)
    [[0, 2, 5], [1, 3, 4]]
    """
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    rows = [[(costs[index], [index]) for index in order[low : low + parts]] for low in range(0, len(order), parts)]
    heap = [(_spread(row), number, row) for number, row in enumerate(rows)]
    heapq.heapify(heap)
    while len(heap) > 1:
        # merge the two most uneven rows: the most expensive part of one with the cheapest of the other
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        pairs = zip(first, reversed(second), strict=True)
        merged = sorted(((a + b, own + others) for (a, own), (b, others) in pairs), key=lambda part: -part[0])
        heapq.heappush(heap, (_spread(merged), number, merged))
    return sorted(sorted(items) for _, items in heap[0][2])


def _spread(row: Sequence[tuple[int, list[int]]]) -> int:
    """Compute the negative spread of the costs, so that a heap pops the largest spread first."""
    return row[-1][0] - row[0][0]
