"""Micro-batches: sequences of similar length, padded, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from agentrl.image import PlacedImage
from agentrl.training.scoring.sequences import ScoredSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch:
    """Sequences padded on the right, which causal attention needs no mask for."""

    input_ids: torch.Tensor
    """int64 [sequences, longest]."""
    positions: torch.Tensor
    """Where the wanted tokens are predicted: int64 [targets], indices into the flattened [sequences * longest]."""
    targets: torch.Tensor
    """int64 [targets], sequence after sequence."""
    images: tuple[tuple[PlacedImage, ...], ...]
    """Of each sequence."""

    def places(self, sequences: Sequence[ScoredSequence]) -> Iterator[torch.Tensor]:
        """Of each sequence: where its tokens are among the flattened ones, int64 [length]."""
        longest = self.input_ids.shape[1]
        for row, sequence in enumerate(sequences):
            yield torch.arange(row * longest, row * longest + len(sequence))


def micro_batches(lengths: Sequence[int], budget: int, *, padded: bool = True) -> list[list[int]]:
    """Indices of sequences, longest first, in batches of at most `budget` tokens.

    Where padding counts, a batch ends early if more than half of the next row would be padding. A sequence longer than
    the budget is a batch of its own. Equal lengths keep their order.

    >>> micro_batches([3, 9, 4, 1], budget=8)
    [[1], [2, 0], [3]]
    >>> micro_batches([3, 9, 4, 1], budget=8, padded=False)
    [[1], [2, 0, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return _padded(order, lengths, budget) if padded else _filled(order, lengths, budget)


def _filled(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if not batches or lengths[index] > room:
            batches.append([])
            room = budget
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def _padded(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    longest = room = 0
    for index in order:
        if room == 0 or 2 * lengths[index] < longest:
            batches.append([])
            longest = lengths[index]
            room = max(budget // max(longest, 1), 1)
        batches[-1].append(index)
        room -= 1
    return batches


def pad(sequences: Sequence[ScoredSequence], pad_id: int, *, longest: int | None = None) -> PaddedBatch:
    """Stack sequences.

    Args:
        sequences: One or more.
        pad_id: Any id of the vocabulary; nothing that is read depends on it.
        longest: Length of the rows, where it is not that of the longest sequence.
    """
    longest = longest or max(len(sequence) for sequence in sequences)
    input_ids = torch.full((len(sequences), longest), pad_id)
    for row, sequence in enumerate(sequences):
        input_ids[row, : len(sequence)] = sequence.input_ids
    return PaddedBatch(
        input_ids=input_ids,
        positions=torch.cat([row * longest + sequence.positions for row, sequence in enumerate(sequences)]),
        targets=torch.cat([sequence.targets for sequence in sequences]),
        images=tuple(sequence.images for sequence in sequences),
    )
