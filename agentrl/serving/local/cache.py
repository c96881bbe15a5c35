"""Key-value cache: rows of fixed capacities, in one block per capacity.

A sequence occupies one row and moves to a larger one when it outgrows it. Rows that are attended together therefore
have similar lengths, and memory use follows the number of tokens. A row has the same index in all layers of its block.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from agentrl.message.image import PlacedImage
from agentrl.models.routed_experts import RoutedExperts

STEP = 128
"""Smallest capacity, and the step between the capacities of short rows."""


def capacity_for(length: int, max_context: int) -> int:
    """Return the row capacity for a sequence of `length` tokens: at most a quarter, or one `STEP`, too large."""
    step = max(STEP, 1 << max(0, (length - 1).bit_length() - 3))
    return min(-(-length // step) * step, max_context)


@dataclass(slots=True, eq=False)
class CacheBlock:
    """All rows of one capacity."""

    capacity: int
    expected_rows: int = 0
    """Number of rows that the first use allocates, so that adding rows copies nothing."""
    keys: list[Tensor] = field(default_factory=list)
    """Keys of each layer: [rows, kv_heads, capacity, head_dim]. Those in float32 are transposed in memory, so that the
    scores of one query are computed at its speed."""
    values: list[Tensor] = field(default_factory=list)
    """Values of each layer: [rows, kv_heads, capacity, head_dim]."""
    rows: int = 0
    """Number of rows in the tensors."""
    most_used: int = 0
    """Largest number of rows that held a sequence at once."""
    free: list[int] = field(default_factory=list)
    """Heap of unused rows. The lowest is used first, which keeps used rows together."""
    _adding: Lock = field(default_factory=Lock, init=False, repr=False)
    """Lock of the worker thread that allocates."""

    @property
    def num_used(self) -> int:
        """Number of rows that hold a sequence."""
        return self.rows - len(self.free)

    def take(self) -> int:
        """Return the lowest unused row; adds rows if none is unused."""
        if not self.free:
            self._grow(max(8, self.rows or self.expected_rows))
        row = heapq.heappop(self.free)
        self.most_used = max(self.most_used, self.num_used)
        return row

    def give_back(self, row: int) -> None:
        """Mark a row as unused."""
        heapq.heappush(self.free, row)

    def _grow(self, rows: int) -> None:
        self.free += range(self.rows, self.rows + rows)
        heapq.heapify(self.free)
        self.rows += rows
        for tensors in (self.keys, self.values):
            tensors[:] = [_with_rows(tensor, self.rows) for tensor in tensors]

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, with the dtype and sizes of `key` and `value`.

        Both are [tokens, kv_heads, head_dim].
        """
        if len(self.values) <= index:
            self._add_layers(index + 1, key, value)
        return self.keys[index], self.values[index]

    def _add_layers(self, layers: int, key: Tensor, value: Tensor) -> None:
        with self._adding:
            while len(self.values) < layers:
                # zeros: masked positions are multiplied by a weight of 0, so they must be finite
                self.keys.append(self._key_zeros(key))
                self.values.append(value.new_zeros(self.rows, value.shape[1], self.capacity, value.shape[2]))

    def _key_zeros(self, key: Tensor) -> Tensor:
        if key.dtype is torch.float32:
            return key.new_zeros(self.rows, key.shape[1], key.shape[2], self.capacity).mT
        return key.new_zeros(self.rows, key.shape[1], self.capacity, key.shape[2])

    def copy_row(self, row: int, target: CacheBlock, target_row: int, length: int) -> None:
        """Copy a row's first `length` tokens to a row of another block."""
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            to_keys, to_values = target.layer(index, keys[:, :, 0], values[:, :, 0])
            to_keys[target_row, :, :length] = keys[row, :, :length]
            to_values[target_row, :, :length] = values[row, :, :length]


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return a tensor with zeros in further rows, and the same order in memory."""
    is_transposed = tensor.stride(-1) > 1
    inner = tensor.mT if is_transposed else tensor
    grown = inner.new_empty(rows, *inner.shape[1:])
    grown[: len(inner)] = inner
    grown[len(inner) :].zero_()
    return grown.mT if is_transposed else grown


class PrefixOrigin:
    """Identity of a prefix that several rows hold: bit-identical keys and values, copied from one another."""


@dataclass(slots=True, eq=False)
class CacheRow:
    """Cache row of one sequence."""

    block: CacheBlock
    index: int
    ids: list[int] = field(default_factory=list)
    """Token ids of the sequence; keys and values of the first `computed` are in the row."""
    images: Sequence[PlacedImage] = ()
    """Images of the placeholders in the ids."""
    adapter: str | None = None
    """Adapter that computed the keys and values."""
    computed: int = 0
    origin: PrefixOrigin | None = None
    """Origin of the row's first `shared` tokens; ``None`` if no other row holds them."""
    shared: int = 0
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    """Routed experts of each computed token, if the engine reports them."""
    session_id: str | None = None
    """Session whose next turn reuses the row; ``None`` if none does."""
    in_use: bool = True
    """True if a running request holds the row."""
    last_used: int = 0
    """Value of the scheduler's use counter when the row was last released."""

    def copy_prefix(self, other: CacheRow, length: int) -> None:
        """Copy the first `length` tokens of another row."""
        other.block.copy_row(other.index, self.block, self.index, length)
        self.computed, self.routed_experts = length, other.routed_experts[:length]
        if other.origin is None:
            other.origin, other.shared = PrefixOrigin(), length
        self.origin, self.shared = other.origin, min(length, other.shared)

    def keep(self, length: int) -> None:
        """Keep the first `length` computed tokens, and discard the others."""
        self.computed, self.shared = length, min(self.shared, length)
        if not self.shared:
            self.origin = None


class RowStore:
    """Rows of all blocks. The capacities of rows that hold a sequence sum to at most `max_tokens`."""

    def __init__(self, *, max_tokens: int, max_context: int) -> None:
        self.max_tokens = max_tokens
        self.max_context = max_context
        self.reserved_tokens = 0
        self._blocks: dict[int, CacheBlock] = {}
        self._cleared_rows: dict[int, int] = {}
        """Number of rows per capacity that were used before the cache was last cleared."""

    def has_room(self, length: int, *, instead_of: CacheRow | None = None) -> bool:
        """Return True if a row for `length` tokens fits the budget once the row `instead_of` is released."""
        freed = 0 if instead_of is None else instead_of.block.capacity
        return self.reserved_tokens - freed + capacity_for(length, self.max_context) <= self.max_tokens

    def take(self, length: int) -> CacheRow:
        """Take a row for a sequence of `length` tokens."""
        capacity = capacity_for(length, self.max_context)
        if capacity not in self._blocks:
            self._drop_empty_blocks()
            unallocated = max(0, self.max_tokens - self._allocated_tokens())
            expected = min(self._cleared_rows.get(capacity, 0), unallocated // capacity)
            self._blocks[capacity] = CacheBlock(capacity, expected)
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
        """Release a row."""
        row.block.give_back(row.index)
        self.reserved_tokens -= row.block.capacity

    def clear(self) -> None:
        """Free the memory of all rows, which may contain non-finite values. No row may hold a sequence."""
        if self._blocks:
            self._cleared_rows = {capacity: block.most_used for capacity, block in self._blocks.items()}
        self._blocks.clear()

    def _allocated_tokens(self) -> int:
        return sum(block.rows * capacity for capacity, block in self._blocks.items())

    def _drop_empty_blocks(self) -> None:
        if self._allocated_tokens() > self.max_tokens:
            self._blocks = {capacity: block for capacity, block in self._blocks.items() if block.num_used}
