"""The key-value cache: rows of a fixed capacity, on one block per capacity.

A sequence lives in one row and moves to a larger one when it outgrows it, so that rows that are attended together
differ little in length, and memory follows the tokens that are really there. All layers of a block share the row's
number.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from agentrl.image import PlacedImage
from agentrl.routed_experts import RoutedExperts

STEP = 128
"""Smallest capacity, and the distance between capacities of short rows."""


def capacity_for(length: int, max_context: int) -> int:
    """Capacity of the row for a sequence of `length` tokens: at most a quarter, or one `STEP`, too large."""
    step = max(STEP, 1 << max(0, (length - 1).bit_length() - 3))
    return min(-(-length // step) * step, max_context)


@dataclass(slots=True, eq=False)
class CacheBlock:
    """All rows of one capacity."""

    capacity: int
    keys: list[Tensor] = field(default_factory=list)
    """Per layer: [rows, kv_heads, capacity, head_dim]."""
    values: list[Tensor] = field(default_factory=list)
    rows: int = 0
    """Rows in the tensors."""
    free: list[int] = field(default_factory=list)
    """Heap of unused rows: the lowest is used first, which keeps the used ones together."""
    _adding: Lock = field(default_factory=Lock, init=False, repr=False)
    """Held by the lane that allocates."""

    @property
    def num_used(self) -> int:
        """Rows that hold a sequence."""
        return self.rows - len(self.free)

    def take(self) -> int:
        """Return the lowest unused row; the block grows when there is none."""
        if not self.free:
            self._grow(max(8, self.rows))
        return heapq.heappop(self.free)

    def give_back(self, row: int) -> None:
        """Make a row unused."""
        heapq.heappush(self.free, row)

    def _grow(self, rows: int) -> None:
        self.free += range(self.rows, self.rows + rows)
        heapq.heapify(self.free)
        self.rows += rows
        for tensors in (self.keys, self.values):
            tensors[:] = [torch.cat([t, t.new_zeros(rows, *t.shape[1:])]) for t in tensors]

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, made in the likeness of `key` and `value` ([tokens, kv_heads, head_dim])."""
        if len(self.values) <= index:
            self._add_layers(index + 1, key, value)
        return self.keys[index], self.values[index]

    def _add_layers(self, layers: int, key: Tensor, value: Tensor) -> None:
        with self._adding:
            while len(self.values) < layers:
                # zeros: what a masked position holds is multiplied by a weight of 0 and must be finite
                self.keys.append(key.new_zeros(self.rows, key.shape[1], self.capacity, key.shape[2]))
                self.values.append(value.new_zeros(self.rows, value.shape[1], self.capacity, value.shape[2]))

    def copy_row(self, row: int, target: CacheBlock, target_row: int, length: int) -> None:
        """Copy a row's first `length` tokens to a row of another block."""
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            to_keys, to_values = target.layer(index, keys[:, :, 0], values[:, :, 0])
            to_keys[target_row, :, :length] = keys[row, :, :length]
            to_values[target_row, :, :length] = values[row, :, :length]


@dataclass(slots=True, eq=False)
class CacheRow:
    """One sequence's place in the cache."""

    block: CacheBlock
    index: int
    ids: list[int] = field(default_factory=list)
    """The sequence; its first `computed` tokens have keys and values here."""
    images: Sequence[PlacedImage] = ()
    """What placeholders among the ids stand for."""
    adapter: str | None = None
    """Whose keys and values they are."""
    computed: int = 0
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    """Experts of each of the computed tokens, where the engine reports them."""
    session_id: str | None = None
    """Session whose next turn finds it; ``None`` when no turn will."""
    in_use: bool = True
    """A running request holds it."""
    last_used: int = 0


class RowStore:
    """Rows of all blocks, within a budget of `max_tokens` over the capacities of rows that hold a sequence."""

    def __init__(self, *, max_tokens: int, max_context: int) -> None:
        self.max_tokens = max_tokens
        self.max_context = max_context
        self.reserved_tokens = 0
        self._blocks: dict[int, CacheBlock] = {}

    def has_room(self, length: int, *, instead_of: CacheRow | None = None) -> bool:
        """Return True if a row for `length` tokens fits the budget, `instead_of` another that is freed afterwards."""
        freed = 0 if instead_of is None else instead_of.block.capacity
        return self.reserved_tokens - freed + capacity_for(length, self.max_context) <= self.max_tokens

    def take(self, length: int) -> CacheRow:
        """Return a row for a sequence of `length` tokens."""
        capacity = capacity_for(length, self.max_context)
        if capacity not in self._blocks:
            self._drop_empty_blocks()
            self._blocks[capacity] = CacheBlock(capacity)
        block = self._blocks[capacity]
        self.reserved_tokens += capacity
        return CacheRow(block, block.take())

    def move(self, row: CacheRow, length: int) -> None:
        """Move a row's sequence to a row for `length` tokens."""
        new = self.take(length)
        row.block.copy_row(row.index, new.block, new.index, row.computed)
        self.give_back(row)
        row.block, row.index = new.block, new.index

    def give_back(self, row: CacheRow) -> None:
        """Make a row's place free for others."""
        row.block.give_back(row.index)
        self.reserved_tokens -= row.block.capacity

    def clear(self) -> None:
        """Drop the memory of all rows, none of which may hold a sequence: it may hold what is not finite."""
        self._blocks.clear()

    def _drop_empty_blocks(self) -> None:
        allocated = sum(block.rows * capacity for capacity, block in self._blocks.items())
        if allocated > self.max_tokens:
            self._blocks = {capacity: block for capacity, block in self._blocks.items() if block.num_used}
