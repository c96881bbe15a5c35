"""Token sequences as inputs of forward passes: ids, and the positions of the target tokens to score.

Sequences of similar length are padded together in micro-batches, within a budget of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from agentrl.errors import LedgerError
from agentrl.message.image import PlacedImage
from agentrl.routed_experts import RoutedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSequence:
    """A sequence up to its last target token.

    Let the tokens at 2, 3 and 5 of the ids ``[5, 6, 8, 2, 9, 4, 7]`` be targets. The model reads the tokens before the
    last target, and the hidden states at 1, 2 and 4 predict the targets:

    >>> sequence = scored_sequence(np.array([5, 6, 8, 2, 9, 4, 7]), np.array([0, 0, 1, 1, 0, 1, 0], dtype=bool))
    >>> sequence.input_ids.tolist(), sequence.positions.tolist(), sequence.targets.tolist()
    ([5, 6, 8, 2, 9], [1, 2, 4], [8, 2, 4])
    """

    input_ids: torch.Tensor
    """Ids of the tokens that the model reads: int64 [length]."""
    positions: torch.Tensor
    """Indices into `input_ids` of the hidden states that predict the targets: int64 [targets], increasing."""
    targets: torch.Tensor
    """Ids of the target tokens: int64 [targets]."""
    images: tuple[PlacedImage, ...] = ()
    routes: torch.Tensor | None = None
    """Experts of the first tokens of `input_ids`, if the engine recorded them: uint8 or int16 [tokens, layers x
    chosen].
    """

    def __len__(self) -> int:
        return self.input_ids.numel()


def scored_sequence(
    token_ids: npt.NDArray[np.generic],
    wanted: npt.NDArray[np.bool_],
    images: Sequence[PlacedImage] = (),
    routes: RoutedExperts | None = None,
) -> ScoredSequence:
    """Cut a sequence after the last of its target tokens (`wanted`).

    Both arrays are [tokens], and at least one token must be a target.

    Raises:
        LedgerError: the first token, which nothing predicts, or an image token is a target.
    """
    ids = torch.from_numpy(token_ids.astype(np.int64))
    index = torch.from_numpy(np.flatnonzero(wanted))
    if index[0] == 0:
        raise LedgerError("the first token of a sequence has a loss", expected="a prompt of at least one token")
    if any(wanted[image.start : image.end].any() for image in images):
        raise LedgerError("an image token has a loss", expected="a loss on text tokens only")
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


def micro_batches(lengths: Sequence[int], budget: int, *, padded: bool = True) -> list[list[int]]:
    """Group sequences, longest first, into batches of at most `budget` tokens; return their indices.

    If `padded`, padding counts, and a batch ends early if more than half of the next row would be padding. A sequence
    longer than the budget has its own batch. Sequences of equal length keep their order.

    >>> micro_batches([3, 9, 4, 1], budget=8)
    [[1], [2, 0], [3]]
    >>> micro_batches([3, 9, 4, 1], budget=8, padded=False)
    [[1], [2, 0, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return _pad_batches(order, lengths, budget) if padded else _pack_batches(order, lengths, budget)


def _pack_batches(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    room = 0
    for index in order:
        if not batches or lengths[index] > room:
            batches.append([])
            room = budget
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def _pad_batches(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
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


def pad(sequences: Sequence[ScoredSequence], pad_id: int, *, longest: int | None = None) -> torch.Tensor:
    """Pad the ids of sequences on the right, for which causal attention needs no mask: int64 [sequences, longest].

    By default, `longest` is the length of the longest sequence.
    """
    longest = longest or max(len(sequence) for sequence in sequences)
    input_ids = torch.full((len(sequences), longest), pad_id)
    for row, sequence in enumerate(sequences):
        input_ids[row, : len(sequence)] = sequence.input_ids
    return input_ids


def padded_places(sequences: Sequence[ScoredSequence], longest: int) -> tuple[torch.Tensor, ...]:
    """Return the indices of each sequence's tokens in flattened rows of length `longest`: int64 [length] each."""
    return tuple(torch.arange(len(sequence)) + row * longest for row, sequence in enumerate(sequences))
