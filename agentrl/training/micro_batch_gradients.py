"""Gradients of micro-batches, computed in lanes (`agentrl.lanes`) and added up in an order that is always the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from agentrl.lanes import Lanes
from agentrl.training.layout import Layout
from agentrl.training.sequences import ScoredSequence

BACKWARD_COST = 3
"""A forward and a backward pass, in forward passes."""

Extra = TypeVar("Extra")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that go through the model together."""

    sequences: list[int]
    learns: bool
    """Whether it has a gradient."""
    tokens: int
    """That go through the model, padding included."""

    @property
    def cost(self) -> int:
        """Relative to others."""
        return self.tokens * (BACKWARD_COST if self.learns else 1)


def cut(
    numbers: Sequence[int], sequences: Sequence[ScoredSequence], *, layout: Layout, lanes: int, learns: bool
) -> list[MicroBatch]:
    """Micro-batches of some sequences.

    Args:
        numbers: Of the sequences.
        sequences: The sequences.
        layout: How they go through the model.
        lanes: How many there are to compute them.
        learns: Whether they have a gradient.
    """
    layout = layout.for_lanes(sequences, lanes)
    return [
        MicroBatch([numbers[k] for k in chosen], learns, layout.tokens([sequences[k] for k in chosen]))
        for chosen in layout.micro_batches(sequences)
    ]


def add_gradients(
    model: PreTrainedModel,
    lanes: Lanes,
    work: Sequence[MicroBatch],
    loss: Callable[[list[int]], tuple[torch.Tensor, Extra]],
) -> list[tuple[float, Extra]]:
    """Add the gradients of all micro-batches to those of the model's parameters.

    Args:
        model: Its parameters that require a gradient get one.
        lanes: Compute the micro-batches.
        work: What to compute.
        loss: Of some sequences, and anything else that the caller wants back; called in the lanes' threads.

    Returns:
        The losses, with what came with them, in the order of `work`.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    shares = share_out([micro_batch.cost for micro_batch in work], lanes.count)
    alone = len(shares) == 1

    def compute(share: list[int]) -> tuple[dict[int, tuple[float, Extra]], list[torch.Tensor | None]]:
        found: dict[int, tuple[float, Extra]] = {}
        gradients: list[torch.Tensor | None] = [None] * len(parameters)
        for index in share:
            with torch.set_grad_enabled(work[index].learns):
                value, extra = loss(work[index].sequences)
            if work[index].learns and alone:
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
    return [results[index] for index in range(len(work))]


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
