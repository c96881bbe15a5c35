"""Gradients of micro-batches, computed in lanes (`agentrl.lanes`) and added up in an order that is always the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.lanes import Lanes
from agentrl.training.ranks.sharding import add_up_gradients
from agentrl.training.scoring.layout import Layout
from agentrl.training.scoring.sequences import ScoredSequence

BACKWARD_COST = 3
"""A forward and a backward pass, in forward passes."""

ATTENTION_COSTS_AS_MUCH = 16_384
"""Length of a sequence at which attention costs as much as all the rest: about 12 times the width of a model."""

Extra = TypeVar("Extra")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that go through the model together."""

    sequences: list[int]
    learns: bool
    """Whether it has a gradient."""
    tokens: int
    """That go through the model, padding included."""
    cost: int
    """Relative to others."""
    counts: bool = True
    """Whether its loss does: one that does not only keeps a rank in step with the others."""


def cut(
    numbers: Sequence[int], sequences: Sequence[ScoredSequence], *, layout: Layout, workers: int, learns: bool
) -> list[MicroBatch]:
    """Micro-batches of some sequences.

    Args:
        numbers: Of the sequences.
        sequences: The sequences.
        layout: How they go through the model.
        workers: How many lanes or ranks there are to compute them.
        learns: Whether they have a gradient.
    """
    passes = BACKWARD_COST if learns else 1
    work = []
    for chosen in layout.for_workers(sequences, workers).micro_batches(sequences):
        part = [sequences[k] for k in chosen]
        tokens = layout.tokens(part)
        cost = forward_cost(tokens, layout.pairs(part)) * passes
        work.append(MicroBatch([numbers[k] for k in chosen], learns, tokens, cost))
    return work


def forward_cost(tokens: int, pairs: int) -> int:
    """Cost of a forward pass, in tokens: attention grows with the pairs of tokens that attend to each other.

    >>> forward_cost(1000, 1000 * 500), forward_cost(16_384, 16_384 * 8192)
    (1061, 32768)
    """
    return tokens + 2 * pairs // ATTENTION_COSTS_AS_MUCH


def add_gradients(
    model: PreTrainedModel,
    lanes: Lanes,
    work: Sequence[MicroBatch],
    loss: Callable[[list[int]], tuple[torch.Tensor, Extra]],
    *,
    every_time: bool = False,
    beside: Sequence[nn.Parameter] = (),
) -> list[tuple[float, Extra]]:
    """Add the gradients of all micro-batches to those of the model's parameters.

    Args:
        model: Its parameters that require a gradient get one.
        lanes: Compute the micro-batches.
        work: What to compute, in this order where there is one lane.
        loss: Of some sequences, and anything else that the caller wants back; called in the lanes' threads.
        every_time: Add the gradients of a model in shards up over the ranks after every micro-batch, not in the end.
        beside: Parameters outside the model, which get a gradient, too.

    Returns:
        The losses, with what came with them, in the order of `work`, of what counts.
    """
    parameters = [*(p for p in model.parameters() if p.requires_grad), *beside]
    costs = [micro_batch.cost for micro_batch in work]
    shares = [list(range(len(work)))] if lanes.count == 1 else share_out(costs, lanes.count)
    last = max((index for index, micro_batch in enumerate(work) if micro_batch.learns), default=None)
    alone = len(shares) == 1

    def compute(share: list[int]) -> tuple[dict[int, tuple[float, Extra]], list[torch.Tensor | None]]:
        found: dict[int, tuple[float, Extra]] = {}
        gradients: list[torch.Tensor | None] = [None] * len(parameters)
        for index in share:
            with torch.set_grad_enabled(work[index].learns):
                value, extra = loss(work[index].sequences)
            if not work[index].counts:
                value = value * 0.0
            if work[index].learns and alone:
                add_up_gradients(model, over_ranks=every_time or index == last)
                torch.autograd.backward(value)
            elif work[index].learns:
                new = torch.autograd.grad(value, parameters, allow_unused=True)
                gradients = [_sum(old, own) for old, own in zip(gradients, new, strict=True)]
            found[index] = float(value.detach()), extra
        return found, gradients

    results: dict[int, tuple[float, Extra]] = {}
    for found, gradients in lanes.run(compute, shares):
        results.update(found)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = _sum(parameter.grad, gradient)
    return [results[index] for index, micro_batch in enumerate(work) if micro_batch.counts]


def share_out(costs: Sequence[int], lanes: int) -> list[list[int]]:
    """What each lane computes: the dearest first, each in the lane with the least to do.

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


def _sum(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    if old is None or new is None:
        return new if old is None else old
    return old.add_(new)
