"""Forward pass over the concatenated tokens of many sequences, with attention per sequence.

The model sees a batch of one row with all tokens of the step; only attention needs to know which sequence a token
belongs to. Sequences with one new token (and perhaps a draft of the next ones) are attended together, per cache block;
the keys and values of a prefix that all of them have in common are read once. Longer chunks are attended one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.errors import UsageError
from agentrl.message.image import rope_positions
from agentrl.models.routed_experts import RoutedExperts
from agentrl.models.vision import View, find_views
from agentrl.serving.local.cache import CacheBlock, CacheRow

UNKNOWN_TERMS = ("s_aux", "position_bias")
"""Arguments of attention functions that change the scores and are not supported."""
BLOCK = 128
"""Queries of one sequence whose scores are computed at once."""
MAX_GAP_ROWS = 4
"""Maximum idle rows between two rows that are attended together."""
MIN_PREFIX_TOKENS = 32
"""Minimum length of a prefix that is attended to once for several rows."""
ATTENTION = "agentrl_step"


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """New tokens of one sequence, starting at position `row.computed`, and the draft that follows them."""

    row: CacheRow
    count: int
    """Number of tokens, including the draft."""
    draft: Sequence[int] = ()
    """Guesses of the sequence's next tokens, which are computed as if they were its own."""

    @property
    def num_known(self) -> int:
        """Number of the sequence's own tokens."""
        return self.count - len(self.draft)

    @property
    def start(self) -> int:
        """Position of the first new token."""
        return self.row.computed

    @property
    def end(self) -> int:
        """Number of computed tokens after this step, including the draft."""
        return self.row.computed + self.count

    def tokens(self) -> list[int]:
        """Return the ids."""
        return [*self.row.ids[self.start : self.end - len(self.draft)], *self.draft]


@dataclass(frozen=True, slots=True)
class _Write:
    """New tokens of a block: any tokens of several rows, or neighbouring tokens of one row."""

    block: CacheBlock
    tokens: slice
    """Place of the tokens in the step."""
    rows: Tensor | int
    """Row of each token, or of all."""
    positions: Tensor | slice

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the step's keys and values, [tokens, kv_heads, head_dim]."""
        all_keys, all_values = self.block.layer(layer, keys, values)
        own_keys, own_values = keys[self.tokens], values[self.tokens]
        if isinstance(self.rows, int):
            all_keys[self.rows, :, self.positions] = own_keys.transpose(0, 1)
            all_values[self.rows, :, self.positions] = own_values.transpose(0, 1)
        else:
            all_keys[self.rows, :, self.positions] = own_keys
            all_values[self.rows, :, self.positions] = own_values


@dataclass(slots=True)
class _BatchedAttention:
    """Attention of neighbouring rows of a block with few new tokens each."""

    block: CacheBlock
    first_row: int
    lengths: Tensor
    """Number of tokens that each query attends to, int64[rows, width]; 1 for rows that are not in the step."""
    longest: int
    queries: Tensor
    """Index in the step of each row's queries, int64[rows * width]. A row with fewer queries repeats one of them."""
    members: Tensor | None
    """Places in `queries` of the tokens of the step; ``None`` if they are all places."""
    first_token: int
    count: int
    """Number of tokens of the step."""
    shared: int
    """Number of first tokens that all rows of the step have in common."""
    biases: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, like: Tensor, first: int = 0) -> Tensor:
        """Return 0 where a query may attend, -inf elsewhere: [rows, 1, 1, width, longest - first]."""
        if (window, first) not in self.biases:
            positions = torch.arange(first, self.longest, device=like.device)
            hidden = positions >= self.lengths[..., None]
            if window is not None:
                hidden |= positions < self.lengths[..., None] - window
            self.biases[window, first] = _bias(hidden, like)[:, None, None]
        return self.biases[window, first]

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None, cap: float | None) -> Tensor:
        """Attend to the cache; returns [count, heads, head_dim]."""
        count, width = self.lengths.shape
        rows = slice(self.first_row, self.first_row + count)
        keys = self.block.keys[layer][rows, :, : self.longest]
        values = self.block.values[layer][rows, :, : self.longest]
        heads, _, size = query.shape
        # queries that share a key-value head become rows of one matrix, so that no key is repeated
        by_row = query[:, self.queries].reshape(heads, count, width, size).transpose(0, 1)
        queries = by_row.reshape(count, keys.shape[1], -1, size)
        if self.shared and window is None and not _is_bfloat16_on_cpu(query):
            attended = self._attend_shared(queries * scale, keys, values, self.bias(window, query, self.shared), cap)
        else:
            attended = self._attend_rows(queries, keys, values, scale, self.bias(window, query), cap)
        attended = attended.reshape(count, heads, width, -1).transpose(1, 2).reshape(count * width, heads, -1)
        return attended if self.members is None else attended[self.members]

    def _attend_shared(self, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, cap: float | None) -> Tensor:
        """Attend with scaled queries; the keys and values of the common prefix are read from the first row only."""
        rows, groups, _, size = queries.shape
        together = queries.transpose(0, 1).reshape(groups, -1, size)
        first = torch.bmm(together, keys[0, :, : self.shared].mT).view(groups, rows, -1, self.shared).transpose(0, 1)
        own = _add_bias(_apply_cap(torch.matmul(queries, keys[:, :, self.shared :].mT), cap), bias)
        scores = torch.cat([_apply_cap(first, cap), own], dim=-1).softmax(dim=-1)
        weights = scores[..., : self.shared].transpose(0, 1).reshape(groups, -1, self.shared)
        first = torch.bmm(weights, values[0, :, : self.shared]).view(groups, rows, -1, values.shape[-1]).transpose(0, 1)
        return torch.matmul(scores[..., self.shared :], values[:, :, self.shared :]).add_(first)

    @staticmethod
    def _attend_rows(
        queries: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor, cap: float | None
    ) -> Tensor:
        """Attend with queries [rows, kv_heads, group * width, head_dim]; scores are float32 for every data type."""
        if _is_bfloat16_on_cpu(queries) and cap is None:
            mask = bias.expand(-1, -1, queries.shape[2] // bias.shape[3], -1, -1).flatten(2, 3)
            return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        if _is_bfloat16_on_cpu(queries):
            exact = (queries.float(), keys.float(), values.float(), scale, bias.float(), cap)
            return _BatchedAttention._attend_rows(*exact).to(queries.dtype)
        scores = _add_bias(_apply_cap(torch.matmul(queries * scale, keys.mT), cap), bias)
        return torch.matmul(scores.softmax(dim=-1), values)


@dataclass(slots=True)
class _SingleAttention:
    """Attention of several new tokens of one row."""

    block: CacheBlock
    row: int
    first_token: int
    count: int
    end: int
    biases: dict[int | None, Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, like: Tensor) -> Tensor:
        """Return 0 where a token may attend, -inf elsewhere: [count, end]."""
        if window not in self.biases:
            own = torch.arange(self.end - self.count, self.end, device=like.device)[:, None]
            positions = torch.arange(self.end, device=like.device)
            hidden = positions > own
            if window is not None:
                hidden |= positions <= own - window
            self.biases[window] = _bias(hidden, like)
        return self.biases[window]

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None, cap: float | None) -> Tensor:
        """Attend to the cache; returns [count, heads, head_dim]."""
        keys = self.block.keys[layer][self.row : self.row + 1, :, : self.end]
        values = self.block.values[layer][self.row : self.row + 1, :, : self.end]
        own = query[None, :, self.first_token : self.first_token + self.count]
        if cap is None and window is None and query.device.type == "cpu":
            return _attend_in_blocks(own[0].float(), keys[0].float(), values[0].float(), scale).to(query.dtype)
        if cap is not None:
            groups = own.shape[1] // keys.shape[1]
            scores = _apply_cap(own @ keys.repeat_interleave(groups, 1).mT * scale, cap) + self.bias(window, query)
            return (scores.softmax(dim=-1) @ values.repeat_interleave(groups, 1))[0].transpose(0, 1)
        if keys.stride(-1) > 1:
            keys = keys.contiguous()  # torch's fast attention does not read transposed keys
        whole = self.count == self.end and window is None
        mask = None if whole else self.bias(window, query)
        attended = scaled_dot_product_attention(
            own, keys, values, attn_mask=mask, is_causal=whole, scale=scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


def _is_bfloat16_on_cpu(like: Tensor) -> bool:
    """Return True for tensors whose products would be rounded to bfloat16.

    Scores of Qwen2.5 reach hundreds, where adjacent bfloat16 values differ by 1 or more.
    """
    return like.dtype is torch.bfloat16 and like.device.type == "cpu"


def _attend_in_blocks(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Compute causal attention for the last tokens of a sequence, `BLOCK` queries at a time.

    On a CPU, this is 1.1 to 1.5 times as fast as `scaled_dot_product_attention` in float32. With operands converted to
    float32, it is 1.4 to 1.6 times as fast as that in bfloat16.

    Args:
        query: [heads, count, head_dim].
        keys: [kv_heads, end, head_dim].
        values: [kv_heads, end, value_dim].
        scale: Factor of the scores.

    Returns:
        [count, heads, value_dim].
    """
    heads, count, size = query.shape
    groups, end = keys.shape[0], keys.shape[1]
    scaled = (query * scale).view(groups, heads // groups, count, size)
    found = query.new_empty(count, heads, values.shape[-1])
    for first in range(0, count, BLOCK):
        last = min(first + BLOCK, count)
        rows, seen = last - first, end - count + last
        scores = torch.bmm(scaled[:, :, first:last].reshape(groups, -1, size), keys[:, :seen].mT)
        scores = scores.view(groups, -1, rows, seen)
        later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu_(1)
        scores[..., seen - rows :].masked_fill_(later, float("-inf"))
        block = torch.bmm(scores.softmax(-1).view(groups, -1, seen), values[:, :seen])
        found[first:last] = block.view(heads, rows, -1).transpose(0, 1)
    return found


def _bias(hidden: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


def _add_bias(scores: Tensor, bias: Tensor) -> Tensor:
    """Add a bias [rows, 1, 1, width, n] to scores [rows, kv_heads, group * width, n], in place."""
    scores.view(*scores.shape[:2], -1, *bias.shape[3:]).add_(bias)
    return scores


def _apply_cap(scores: Tensor, cap: float | None) -> Tensor:
    return scores if cap is None else torch.tanh(scores / cap) * cap


class ForwardStep:
    """Tokens of one forward pass: at most one chunk per row, all of the same adapter."""

    def __init__(self, chunks: Sequence[SequenceChunk], device: torch.device, adapter: str | None = None) -> None:
        self.adapter = adapter
        single = sorted((p for p in chunks if p.num_known == 1), key=lambda p: (p.row.block.capacity, p.row.index))
        self.chunks = [*single, *(p for p in chunks if p.num_known > 1)]
        """Chunks in the order of their tokens."""
        starts = [0]
        for chunk in self.chunks:
            starts.append(starts[-1] + chunk.count)
        self._device = device
        ids = [token for p in self.chunks for token in p.tokens()]
        token_positions = [at for p in self.chunks for at in range(p.start, p.end)]
        self.input_ids = torch.tensor([ids], device=device)
        self.token_positions = torch.tensor([token_positions], device=device)
        """Index of each token in its sequence, int64[1, tokens]."""
        self.positions = self.token_positions
        """Rotary positions: equal to `token_positions`, or int64[3, 1, tokens] if a sequence contains images."""
        self.routed_experts: RoutedExperts | None = None
        """Routed experts of each token, once computed."""
        self.views: list[View] = []
        """Image tokens of this step."""
        if any(p.row.images for p in self.chunks):
            self._place_images(starts)
        ends = zip(self.chunks, starts[1:], strict=True)
        last = [token for p, end in ends for token in range(end - len(p.draft) - 1, end)]
        self.last_tokens = torch.tensor(last, device=device)
        """Tokens whose logits are computed: the last own token of each chunk, and its draft; int64[n]."""
        self._writes = list(self._plan_writes(starts, single))
        self._batched = list(self._plan_batched(single))
        self._singles = [
            _SingleAttention(p.row.block, p.row.index, start, p.count, p.end)
            for p, start in zip(self.chunks, starts, strict=False)
            if p.num_known > 1
        ]

    def keep_routed_experts(self) -> None:
        """Store the routed experts of the tokens in their rows; call before the tokens count as computed."""
        if self.routed_experts is None:
            return
        first = 0
        for chunk in self.chunks:
            chunk.row.routed_experts[chunk.start :] = self.routed_experts[first : first + chunk.count]
            first += chunk.count

    def _place_images(self, starts: list[int]) -> None:
        positions = [rope_positions(p.row.images, p.start, p.end) for p in self.chunks]
        self.positions = torch.from_numpy(np.concatenate(positions, axis=1)).to(self._device)[:, None]
        for chunk, start in zip(self.chunks, starts, strict=False):
            self.views += find_views(chunk.row.images, chunk.start, chunk.end, at=start)

    def _plan_writes(self, starts: list[int], single: list[SequenceChunk]) -> Iterator[_Write]:
        first = 0
        for block, chunks in groupby(single, key=lambda p: p.row.block):
            indices = [chunk.row.index for chunk in chunks for _ in range(chunk.count)]
            tokens = slice(first, first + len(indices))
            rows = torch.tensor(indices, device=self._device)
            yield _Write(block, tokens, rows, self.token_positions[0, tokens])
            first += len(indices)
        for chunk, start in zip(self.chunks, starts, strict=False):
            if chunk.num_known > 1:
                tokens = slice(start, start + chunk.count)
                yield _Write(chunk.row.block, tokens, chunk.row.index, slice(chunk.start, chunk.end))

    def _plan_batched(self, single: list[SequenceChunk]) -> Iterator[_BatchedAttention]:
        token = 0
        for block, in_block in groupby(single, key=lambda p: p.row.block):
            for run in _runs(list(in_block)):
                yield self._gather(block, run, token)
                token += sum(chunk.count for chunk in run)

    def _gather(self, block: CacheBlock, run: list[SequenceChunk], token: int) -> _BatchedAttention:
        first = run[0].row.index
        span = run[-1].row.index + 1 - first
        width = max(chunk.count for chunk in run)
        lengths, queries = [1] * (span * width), [token] * (span * width)
        members: list[int] = []
        at = token
        for chunk in run:
            place = (chunk.row.index - first) * width
            own = slice(place, place + chunk.count)
            members += range(own.start, own.stop)
            lengths[own] = range(chunk.start + 1, chunk.end + 1)
            queries[own] = range(at, at + chunk.count)
            at += chunk.count
        return _BatchedAttention(
            block=block,
            first_row=first,
            lengths=torch.tensor(lengths, device=self._device).view(span, width),
            longest=max(lengths),
            queries=torch.tensor(queries, device=self._device),
            members=torch.tensor(members, device=self._device) if len(members) < len(queries) else None,
            first_token=token,
            count=at - token,
            shared=_common_prefix([chunk.row for chunk in run]),
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        cap: float | None = None,
    ) -> Tensor:
        """Store the new keys and values, then attend.

        Args:
            layer: Number of the layer.
            query: [heads, tokens, head_dim].
            key: [kv_heads, tokens, head_dim], rotated.
            value: [kv_heads, tokens, head_dim].
            scale: Factor of the scores.
            window: Number of tokens that a token attends to, including itself; ``None`` for all.
            cap: Soft limit of the scores; ``None`` for no limit.

        Returns:
            [tokens, heads, head_dim].
        """
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        for write in self._writes:
            write.store(layer, keys, values)
        parts: list[_BatchedAttention | _SingleAttention] = [*self._batched, *self._singles]
        if len(parts) == 1:
            return parts[0].attend(layer, query, scale, window, cap)
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        for part in parts:
            out[part.first_token : part.first_token + part.count] = part.attend(layer, query, scale, window, cap)
        return out


def _common_prefix(rows: Sequence[CacheRow]) -> int:
    """Return the number of first tokens that rows have in common, or 0 if reading them once does not pay."""
    shared = min(row.shared for row in rows)
    alike = len(rows) > 1 and len({row.origin for row in rows}) == 1
    return shared if alike and shared >= MIN_PREFIX_TOKENS else 0


def _runs(chunks: list[SequenceChunk]) -> Iterator[list[SequenceChunk]]:
    """Split chunks, sorted by row, at gaps of more than `MAX_GAP_ROWS` rows."""
    run = [chunks[0]]
    for chunk in chunks[1:]:
        if chunk.row.index - run[-1].row.index > MAX_GAP_ROWS + 1:
            yield run
            run = []
        run.append(chunk)
    yield run


def step_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: ForwardStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention over the sequences of a `ForwardStep`, as an attention function of transformers.

    Tensors are [1, heads, tokens, head_dim].
    """
    if changed := [name for name in UNKNOWN_TERMS if options.get(name) is not None]:
        raise UsageError("the local engine does not support this model", got=f"attention with {', '.join(changed)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = cast("int", module.layer_idx)
    return step.attend(layer, query[0], key[0], value[0], scale, sliding_window, softcap)[None], None


AttentionInterface.register(ATTENTION, step_attention)
