"""Packed rows: sequences as one row of tokens without padding, in which common prefixes may be shared.

The sequences form a trie over token ids. Its nodes, runs of tokens without a branch, are laid out in depth-first order:

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
from dataclasses import dataclass, field

import numpy as np
import torch

from agentrl.training.forward.sequences import ScoredSequence


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
    places: tuple[torch.Tensor, ...]
    """Indices in the row of each sequence's tokens, int64 [length], in the order of the given sequences."""

    def ends(self) -> torch.Tensor:
        """Find the end of the subtree of each token's node: int64 [tokens]."""
        ends = torch.empty_like(self.depths)
        for node in self.nodes:
            ends[node.start : node.end] = node.last
        return ends

    def pad(self, length: Callable[[int], int], pad_id: int) -> PackedRow:
        """Append unused tokens up to the length that `length` computes from the row's length."""
        tokens = self.input_ids.numel()
        more = length(tokens) - tokens
        if more == 0:
            return self
        return PackedRow(
            input_ids=torch.cat([self.input_ids, torch.full((more,), pad_id)]),
            depths=torch.cat([self.depths, torch.arange(more)]),
            nodes=(*self.nodes, PrefixNode(tokens, tokens + more, tokens + more)),
            places=self.places,
        )


def pack(sequences: Sequence[ScoredSequence], *, share: int) -> PackedRow:
    """Lay sequences out in one row; share common prefixes of at least `share` tokens, or none if `share` is 0."""
    order, common = sorted_prefixes(sequences) if share else (range(len(sequences)), [0] * len(sequences))
    row = _Row(share)
    places: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
    for index, shared in zip(order, common, strict=True):
        row.append(len(sequences[index]), shared)
        places[index] = row.place()
    input_ids, depths = torch.empty(row.tokens, dtype=torch.long), torch.empty(row.tokens, dtype=torch.long)
    for sequence, place in zip(sequences, places, strict=True):
        input_ids[place] = sequence.input_ids
        depths[place] = torch.arange(len(sequence))
    return PackedRow(input_ids=input_ids, depths=depths, nodes=row.nodes(), places=tuple(places))


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


_Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


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
    row = _Row(share)
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
class _Row:
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

    def place(self) -> torch.Tensor:
        """Return the indices in the row of the tokens of the sequence that was appended last."""
        return torch.cat([torch.arange(node.start, node.end) for node in self._path])

    def nodes(self) -> tuple[PrefixNode, ...]:
        """Close the path and return all nodes; nothing may be appended afterwards."""
        while self._path:
            self._close(self._path.pop())
        return tuple(sorted(self._closed, key=lambda node: node.start))
