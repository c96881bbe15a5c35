"""Token sequences as a model's forward pass needs them: ids, and the positions whose log-probability is wanted.

Sequences of similar length are padded together in micro-batches, within a budget of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from agentrl.errors import LedgerError
from agentrl.image import PlacedImage
from agentrl.routed_experts import RoutedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSequence:
    """One sequence, cut after its last wanted token.

    Of the ids ``[5, 6, 8, 2, 9, 4, 7]`` the tokens at 2, 3 and 5 are wanted. The model reads up to the token before the
    last one wanted, and the hidden states at 1, 2 and 4 predict them:

    >>> sequence = scored_sequence(np.array([5, 6, 8, 2, 9, 4, 7]), np.array([0, 0, 1, 1, 0, 1, 0], dtype=bool))
    >>> sequence.input_ids.tolist(), sequence.positions.tolist(), sequence.targets.tolist()
    ([5, 6, 8, 2, 9], [1, 2, 4], [8, 2, 4])
    """

    input_ids: torch.Tensor
    """int64 [length]."""
    positions: torch.Tensor
    """Indices into `input_ids` of the hidden states that predict the targets: int64 [targets], rising."""
    targets: torch.Tensor
    """The wanted tokens: int64 [targets]."""
    images: tuple[PlacedImage, ...] = ()
    routes: torch.Tensor | None = None
    """Experts of the first of `input_ids`, where the engine recorded them: uint8 or int16 [tokens, layers x chosen]."""

    def __len__(self) -> int:
        return self.input_ids.numel()


def scored_sequence(
    token_ids: npt.NDArray[np.generic],
    wanted: npt.NDArray[np.bool_],
    images: Sequence[PlacedImage] = (),
    routes: RoutedExperts | None = None,
) -> ScoredSequence:
    """Cut a sequence after the last of its wanted tokens; both arrays are [tokens], and at least one is wanted.

    Raises:
        LedgerError: the first token is wanted, and nothing precedes it to predict it from; or one that stands for an
            image is, which models do not predict.
    """
    ids = torch.from_numpy(token_ids.astype(np.int64))
    index = torch.from_numpy(np.flatnonzero(wanted))
    if index[0] == 0:
        raise LedgerError("the first token of a sequence carries loss", expected="a prompt of one token or more")
    if any(wanted[image.start : image.end].any() for image in images):
        raise LedgerError("a token of an image carries loss", expected="loss on text only")
    read = tuple(image for image in images if image.start < index[-1])
    return ScoredSequence(
        input_ids=ids[: index[-1]],
        positions=index - 1,
        targets=ids[index],
        images=read,
        routes=None if routes is None else _tensor(routes[: index[-1]]),
    )


def _tensor(routes: RoutedExperts) -> torch.Tensor:
    return torch.from_numpy(routes if routes.dtype == np.uint8 else routes.astype(np.int16))


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

    def places(self, sequences: Sequence[ScoredSequence]) -> Iterator[torch.Tensor]:
        """Give the places of each sequence's tokens among the flattened ones: int64 [length]."""
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
    """Stack sequences on rows of the longest one's length, or of a given one."""
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
