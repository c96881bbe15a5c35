"""Sequences as inputs of forward passes: padded rows, or one packed row in which common prefixes may be shared.

Sequences of similar length are padded together in micro-batches, within a budget of tokens. In a packed row, the
sequences form a trie over token ids. Its nodes, runs of tokens without a branch, are laid out in depth-first order:

    A B C D E          row:   A B | C D E | X Y
    A B X Y            depth: 0 1 | 2 3 4 | 2 3
                       end:   7 7 | 5 5 5 | 7 7

A token's position in its sequences is its depth. `end` is the index in the row at which the subtree of its node ends,
so token i attends to token j if and only if j <= i < end[j]. Sequences without a shared prefix are trees with one node.
With router replay, a shared prefix ends before the first token that the engine routed to different experts.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from agentrl.errors import LedgerError
from agentrl.message.image import PlacedImage
from agentrl.models.routed_experts import RoutedExperts

PAD_ID = 0
"""Id of the tokens that only fill rows; results do not depend on it."""
_Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSequence:
    """A sequence up to its last target token.

    Let the tokens at 2, 3 and 5 of the ids ``[5, 6, 8, 2, 9, 4, 7]`` be targets. The model reads the tokens before the
    last target, and the hidden states at positions 1, 2 and 4 predict the targets:

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


def with_prefix(sequence: ScoredSequence, prefix: Sequence[int]) -> ScoredSequence:
    """Return a sequence with other tokens before it, and the same targets.

    >>> sequence = scored_sequence(np.array([5, 6, 8]), np.array([0, 0, 1], dtype=bool))
    >>> longer = with_prefix(sequence, [1, 2])
    >>> longer.input_ids.tolist(), longer.positions.tolist(), longer.targets.tolist()
    ([1, 2, 5, 6], [3], [8])
    """
    moved = tuple(replace(image, start=image.start + len(prefix)) for image in sequence.images)
    return replace(
        sequence,
        input_ids=torch.cat([torch.tensor(list(prefix), dtype=torch.int64), sequence.input_ids]),
        positions=sequence.positions + len(prefix),
        images=moved,
        routes=None,
    )


def _tensor(routes: RoutedExperts) -> torch.Tensor:
    return torch.from_numpy(routes if routes.dtype == np.uint8 else routes.astype(np.int16))


def group_by_length(lengths: Sequence[int], budget: int, *, padded: bool = True) -> list[list[int]]:
    """Group sequences, longest first, into batches of at most `budget` tokens; return their indices.

    If `padded`, padding counts, and a batch ends early if more than half of the next row would be padding. A sequence
    longer than the budget has its own batch. Sequences of equal length keep their order.

    >>> group_by_length([3, 9, 4, 1], budget=8)
    [[1], [2, 0], [3]]
    >>> group_by_length([3, 9, 4, 1], budget=8, padded=False)
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


def pad(sequences: Sequence[ScoredSequence], *, longest: int | None = None) -> torch.Tensor:
    """Pad the ids of sequences on the right, for which causal attention needs no mask: int64 [sequences, longest].

    By default, `longest` is the length of the longest sequence.
    """
    longest = longest or max(len(sequence) for sequence in sequences)
    input_ids = torch.full((len(sequences), longest), PAD_ID)
    for row, sequence in enumerate(sequences):
        input_ids[row, : len(sequence)] = sequence.input_ids
    return input_ids


def padded_indices(sequences: Sequence[ScoredSequence], longest: int) -> tuple[torch.Tensor, ...]:
    """Return the indices of each sequence's tokens in flattened rows of length `longest`: int64 [length] each."""
    return tuple(torch.arange(len(sequence)) + row * longest for row, sequence in enumerate(sequences))


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """Node of the trie: the tokens `start` to `end` of a row; the tokens below it follow, up to `last`."""

    start: int
    end: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Sequences in one row; the module's docstring has an example."""

    input_ids: torch.Tensor
    """Token ids: int64 [tokens]."""
    depths: torch.Tensor
    """Position of each token in its sequences: int64 [tokens]."""
    nodes: tuple[PrefixNode, ...]
    """Nodes of the trie, ordered by start."""
    indices: tuple[torch.Tensor, ...]
    """Indices in the row of each sequence's tokens, int64 [length], in the order of the given sequences."""

    def ends(self) -> torch.Tensor:
        """Find the end of the subtree of each token's node: int64 [tokens]."""
        ends = torch.empty_like(self.depths)
        for node in self.nodes:
            ends[node.start : node.end] = node.last
        return ends

    def pad(self, length: Callable[[int], int]) -> PackedRow:
        """Append unused tokens up to the length that `length` computes from the row's length."""
        tokens = self.input_ids.numel()
        more = length(tokens) - tokens
        if more == 0:
            return self
        return PackedRow(
            input_ids=torch.cat([self.input_ids, torch.full((more,), PAD_ID)]),
            depths=torch.cat([self.depths, torch.arange(more)]),
            nodes=(*self.nodes, PrefixNode(tokens, tokens + more, tokens + more)),
            indices=self.indices,
        )


def pack(sequences: Sequence[ScoredSequence], *, share: int) -> PackedRow:
    """Lay sequences out in one row; share common prefixes of at least `share` tokens, or none if `share` is 0."""
    order, common = sorted_prefixes(sequences) if share else (range(len(sequences)), [0] * len(sequences))
    row = _RowBuilder(share)
    indices: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
    for index, shared in zip(order, common, strict=True):
        row.append(len(sequences[index]), shared)
        indices[index] = row.last_indices()
    input_ids, depths = torch.empty(row.tokens, dtype=torch.long), torch.empty(row.tokens, dtype=torch.long)
    for sequence, own in zip(sequences, indices, strict=True):
        input_ids[own] = sequence.input_ids
        depths[own] = torch.arange(len(sequence))
    return PackedRow(input_ids=input_ids, depths=depths, nodes=row.nodes(), indices=tuple(indices))


def shared_rows(sequences: Sequence[ScoredSequence], budget: int, *, share: int) -> list[list[int]]:
    """Group sequences into rows of at most `budget` tokens that share prefixes of at least `share` tokens.

    Sequences stay together with their neighbours in the order of their tokens. If a trie does not fit, it is cut where
    the least is shared, within the second half of the sequences that fit, and the shared prefix is repeated. A sequence
    longer than the budget has its own row.

    Returns:
        Indices of the sequences of each row.
    """
    order, common = sorted_prefixes(sequences)
    rows = []
    start = 0
    while start < len(order):
        end = start + _fitting([len(sequences[i]) for i in order[start:]], [0, *common[start + 1 :]], budget, share)
        if end < len(order):
            middle = start + (end - start) // 2
            end = min(range(end, middle, -1), key=lambda k: common[k])
        rows.append(list(order[start:end]))
        start = end
    return rows


def sorted_prefixes(sequences: Sequence[ScoredSequence]) -> tuple[list[int], list[int]]:
    """Sort sequences by their tokens.

    Returns:
        Indices of the sequences in order, and the length of the prefix that each shares with the previous one.
    """
    ids = [sequence.input_ids.numpy() for sequence in sequences]
    routes = [sequence.routes for sequence in sequences]
    order = sorted(range(len(ids)), key=lambda i: ids[i].astype(">i8").tobytes())
    common = [
        min(_common_prefix(ids[before], ids[after]), _common_routes(routes[before], routes[after]))
        for before, after in itertools.pairwise(order)
    ]
    return order, [0, *common][: len(order)]


def _common_prefix(left: _Ids, right: _Ids) -> int:
    shorter = min(len(left), len(right))
    different = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(different[0]) if len(different) else shorter


def _common_routes(left: torch.Tensor | None, right: torch.Tensor | None) -> int:
    """Count the first tokens with equal routes; no limit if both are unknown."""
    if left is None or right is None:
        return sys.maxsize if left is right else 0
    shorter = min(len(left), len(right))
    different = (left[:shorter] != right[:shorter]).any(1).nonzero()
    return int(different[0]) if len(different) else shorter


def _fitting(lengths: Sequence[int], common: Sequence[int], budget: int, share: int) -> int:
    """Count the sequences that fit into a row; at least one."""
    row = _RowBuilder(share)
    for count, (length, shared) in enumerate(zip(lengths, common, strict=True)):
        row.append(length, shared)
        if row.tokens > budget and count:
            return count
    return len(lengths)


@dataclass(slots=True)
class _Open:
    """Node on the path of the sequence that was appended last."""

    start: int
    end: int
    depth: int

    @property
    def depth_end(self) -> int:
        return self.depth + self.end - self.start


@dataclass(slots=True)
class _RowBuilder:
    """Builder of a row, to which sequences are appended in the order of their tokens."""

    share: int
    tokens: int = 0
    _path: list[_Open] = field(default_factory=list)
    _closed: list[PrefixNode] = field(default_factory=list)

    def append(self, length: int, shared: int) -> None:
        """Append a sequence that shares its first `shared` tokens with the previous one."""
        depth = self._branch(shared)
        if depth < length:
            self._path.append(_Open(self.tokens, self.tokens + length - depth, depth))
            self.tokens += length - depth

    def _branch(self, shared: int) -> int:
        """Cut the path where the next branch begins; return the branch's depth, which is `shared` or slightly less."""
        while self._path and self._path[-1].depth >= shared:
            self._close(self._path.pop())
        if not self._path:
            return 0
        top = self._path[-1]
        if top.depth_end <= shared:
            return top.depth_end
        if shared - top.depth < self.share:
            self._close(self._path.pop())
            return top.depth
        cut = top.start + shared - top.depth
        self._close(_Open(cut, top.end, shared))
        top.end = cut
        return shared

    def _close(self, node: _Open) -> None:
        self._closed.append(PrefixNode(node.start, node.end, self.tokens))

    def last_indices(self) -> torch.Tensor:
        """Return the indices in the row of the tokens of the sequence that was appended last."""
        return torch.cat([torch.arange(node.start, node.end) for node in self._path])

    def nodes(self) -> tuple[PrefixNode, ...]:
        """Close the path and return all nodes; nothing may be appended afterwards."""
        while self._path:
            self._close(self._path.pop())
        return tuple(sorted(self._closed, key=lambda node: node.start))
