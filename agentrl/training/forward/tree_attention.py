"""Attention over a packed row of sequences (`agentrl.training.forward.sequences`), with the device's fastest kernel.

On the CPU, attention is computed node by node. On CUDA, FlashAttention computes rows without shared prefixes, if it is
installed, and flex_attention the others. Other devices use a dense mask, as does the CPU for capped scores and for
sliding windows shorter than the sequences.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl.errors import UsageError
from agentrl.training.distributed.context_parallel import Attention
from agentrl.training.forward.sequences import PackedRow, PrefixNode

_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
ATTENTION = "agentrl_tree"
"""Name of this attention in transformers; without the argument `tree`, it is SDPA."""
UNKNOWN_TERMS = ("s_aux", "position_bias")


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Tokens that attend to the tokens of a node."""

    queries: slice
    keys: slice
    causal: bool
    """True if the queries are the node's own tokens."""
    first: bool
    """True if the queries have no earlier block."""


def node_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: tuple[AttentionBlock, ...], *, scale: float
) -> Tensor:
    """Compute a layer's attention block by block with torch's fused CPU kernels: [1, heads, tokens, size]."""
    function: Any = _NodeAttention
    return cast("Tensor", function.apply(query, key, value, blocks, scale))


class _NodeAttention(torch.autograd.Function):
    """Attention node by node, with torch's fused CPU kernels."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: tuple[AttentionBlock, ...], scale: float
    ) -> Tensor:
        rows, heads, tokens, _ = query.shape
        exact = torch.promote_types(query.dtype, torch.float32)  # or else every merge rounds
        dtype = query.dtype if all(block.first for block in blocks) else exact
        merged = query.new_empty(rows, tokens, heads, value.shape[-1], dtype=dtype).transpose(1, 2)
        total = query.new_empty(query.shape[:-1], dtype=exact)
        for block in blocks:
            part, keys = query[:, :, block.queries], (key[:, :, block.keys], value[:, :, block.keys])
            attended, sums = _FORWARD(part, *keys, 0.0, block.causal, scale=scale)
            if not block.first:
                attended, sums = _merge(merged[:, :, block.queries], total[:, :, block.queries], attended, sums)
            merged[:, :, block.queries], total[:, :, block.queries] = attended, sums
        merged = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, merged, total)
        ctx.blocks, ctx.scale = blocks, scale
        return merged

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, merged, total = ctx.saved_tensors
        by_query, by_key, by_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        for block in ctx.blocks:
            found = _BACKWARD(
                gradient[:, :, block.queries],
                query[:, :, block.queries],
                key[:, :, block.keys],
                value[:, :, block.keys],
                merged[:, :, block.queries],
                total[:, :, block.queries],
                0.0,
                block.causal,
                scale=ctx.scale,
            )
            by_query[:, :, block.queries] += found[0]
            by_key[:, :, block.keys] += found[1]
            by_value[:, :, block.keys] += found[2]
        return by_query, by_key, by_value, None, None


def _merge(left: Tensor, left_sums: Tensor, right: Tensor, right_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two sets of keys, from the attention over each and its log-sum-exp."""
    sums = torch.logaddexp(left_sums, right_sums)
    shares = ((own - sums).exp()[..., None] for own in (left_sums, right_sums))
    return left * next(shares) + right * next(shares), sums


def attention_blocks(nodes: Sequence[PrefixNode]) -> Iterator[AttentionBlock]:
    """Yield the blocks of a row: for each node, its own tokens, then all tokens below it."""
    tree_end = 0
    for node in nodes:
        first = node.start >= tree_end
        tree_end = max(tree_end, node.last)
        own, below = slice(node.start, node.end), slice(node.end, node.last)
        yield AttentionBlock(own, own, causal=True, first=first)
        if node.end < node.last:
            yield AttentionBlock(below, own, causal=False, first=first)


class AttentionTree:
    """Attention in a packed row, for all layers of a forward pass."""

    def __init__(self, row: PackedRow, device: torch.device) -> None:
        self.nodes, self._blocks = row.nodes, tuple(attention_blocks(row.nodes))
        self._depths, self._ends = row.depths.to(device), row.ends().to(device)
        self._longest = int(row.depths.max()) + 1
        self._starts = [node.start for node in row.nodes if int(row.depths[node.start]) == 0]
        self._masks: dict[int | None, Tensor] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None = None
    ) -> Tensor:
        """Compute a layer's attention.

        Args:
            query: Queries: [1, heads, tokens, size].
            key: Keys: [1, key-value heads, tokens, size].
            value: Values: [1, key-value heads, tokens, value size]; latent attention has smaller values than queries.
            scale: Factor of the scores.
            window: Number of tokens to which a token attends, including itself; ``None`` for all.
            cap: Value at which scores are softly capped, if any.
        """
        window = None if window is None or window >= self._longest else window
        if query.device.type == "cpu" and window is None and cap is None:
            attended = node_attention(query, key, _pad_values(value, query), self._blocks, scale=scale)
            return attended[..., : value.shape[-1]]
        if query.device.type == "cuda":
            if len(self._starts) == len(self.nodes) and has_flash(query.dtype):
                packed = self._flash(query, key, _pad_values(value, query), scale, window, cap)
                return packed[..., : value.shape[-1]]
            options: dict[str, Any] = {"block_mask": self.block_mask(window), "scale": scale, "enable_gqa": True}
            return cast("Tensor", _compiled_flex()(query, key, value, score_mod=_make_cap(cap), **options))
        mask = self.mask(window)
        if cap is not None:
            return capped_attention(query, key, value, mask, scale=scale, cap=cap)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)

    def sees(self, window: int | None, queries: Tensor, keys: Tensor) -> Tensor:
        """Return True where a query attends to a key; int64 indices with shapes that broadcast."""
        seen = (keys <= queries) & (queries < self._ends[keys])
        if window is not None:
            seen = seen & (self._depths[queries] - self._depths[keys] < window)
        return seen

    def mask(self, window: int | None) -> Tensor:
        """Return the attention mask: bool [tokens, tokens]."""
        if window not in self._masks:
            index = torch.arange(len(self._ends), device=self._ends.device)
            self._masks[window] = self.sees(window, index[:, None], index)
        return self._masks[window]

    def block_mask(self, window: int | None) -> BlockMask:
        """Return the attention mask for flex_attention."""
        if window not in self._block_masks:
            tokens, device = len(self._ends), self._ends.device

            def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return self.sees(window, query, key)

            self._block_masks[window] = create_block_mask(sees, None, None, tokens, tokens, device=str(device))
        return self._block_masks[window]

    def _flash(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        bounds = torch.tensor([*self._starts, len(self._ends)], dtype=torch.int32, device=query.device)
        attended = importlib.import_module("flash_attn").flash_attn_varlen_func(
            *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=self._longest,
            max_seqlen_k=self._longest,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            softcap=cap or 0.0,
        )
        return cast("Tensor", attended.transpose(0, 1)[None])


class PaddedAttention:
    """Causal attention in rows that are padded on the right."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None = None
    ) -> Tensor:
        """Compute a layer's attention; see `Attention.attend`."""
        tokens, mask = query.shape[2], None
        if window is not None and window < tokens:
            index = torch.arange(tokens, device=query.device)
            apart = index[:, None] - index
            mask = (apart >= 0) & (apart < window)
        if cap is not None:
            return capped_attention(query, key, value, mask, scale=scale, cap=cap)
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float, cap: float
) -> Tensor:
    """Compute attention with scores that are scaled and then softly capped at `cap`; causal if there is no mask.

    Shapes are those of SDPA.
    """
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.tanh(query @ keys.mT * (scale / cap)) * cap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values


def _pad_values(value: Tensor, query: Tensor) -> Tensor:
    """Pad values with zeros to the size of queries, for kernels that need equal sizes; outputs are padded alike."""
    missing = query.shape[-1] - value.shape[-1]
    return pad(value, (0, missing)) if missing else value


@functools.cache
def _make_cap(cap: float | None) -> Callable[..., Tensor] | None:
    """Make the function that flex_attention applies to scores."""
    if cap is None:
        return None

    def cap_score(score: Tensor, *_: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return cap_score


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def has_flash(dtype: torch.dtype) -> bool:
    """Return True if FlashAttention is installed and supports this data type."""
    return dtype in (torch.float16, torch.bfloat16) and importlib.util.find_spec("flash_attn") is not None


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: Attention | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the interface of transformers.

    Raises:
        UsageError: the model's attention has terms that packed rows do not support.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if tree is None and softcap is not None:
        attended = capped_attention(query, key, value, attention_mask, scale=scale, cap=softcap)
        return attended.transpose(1, 2).contiguous(), None
    if tree is None:
        attended, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return attended, None
    if unsupported := [name for name in UNKNOWN_TERMS if options.get(name) is not None]:
        raise UsageError(
            "this model's attention does not support packed rows", got=f"attention with {', '.join(unsupported)}"
        )
    return tree.attend(query, key, value, scale, sliding_window, softcap).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, tree_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
