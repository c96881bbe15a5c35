"""Attention over a packed row of sequences (`agentrl.training.forward.prefix_tree`), by what the device does best.

On the CPU it is computed node by node (`agentrl.training.forward.tree_attention`). On CUDA, FlashAttention takes rows
in which nothing is shared, if it is installed, and flex_attention the others. Layers with a sliding window that is
shorter than the sequences, and other devices, get a dense mask.
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
from agentrl.training.forward.prefix_tree import PackedRow, PrefixNode

_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Tokens that attend to a node."""

    queries: slice
    keys: slice
    causal: bool
    """They are the node's own."""
    first: bool
    """They have attended to nothing before."""


def node_attention(
    query: Tensor, key: Tensor, value: Tensor, blocks: tuple[AttentionBlock, ...], *, scale: float
) -> Tensor:
    """Attention of a layer, [1, heads, tokens, size], with torch's fused kernels for the CPU, block by block."""
    function: Any = _NodeAttention
    return cast("Tensor", function.apply(query, key, value, blocks, scale))


class _NodeAttention(torch.autograd.Function):
    """Node by node, with torch's fused kernels for the CPU."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: tuple[AttentionBlock, ...], scale: float
    ) -> Tensor:
        rows, heads, tokens, _ = query.shape
        merged = query.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
        total = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        for block in blocks:
            part, keys = query[:, :, block.queries], (key[:, :, block.keys], value[:, :, block.keys])
            attended, sums = _FORWARD(part, *keys, 0.0, block.causal, scale=scale)
            if not block.first:
                attended, sums = _merge(merged[:, :, block.queries], total[:, :, block.queries], attended, sums)
            merged[:, :, block.queries], total[:, :, block.queries] = attended, sums
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
    """Attention over the keys of both, from attention over those of each and its log-sum-exp."""
    sums = torch.logaddexp(left_sums, right_sums)
    shares = ((own - sums).exp()[..., None].to(left.dtype) for own in (left_sums, right_sums))
    return left * next(shares) + right * next(shares), sums


def attention_blocks(nodes: Sequence[PrefixNode]) -> Iterator[AttentionBlock]:
    """Attention in a row, a node at a time: itself, then everything below it."""
    tree_end = 0
    for node in nodes:
        first = node.start >= tree_end
        tree_end = max(tree_end, node.last)
        own, below = slice(node.start, node.end), slice(node.end, node.last)
        yield AttentionBlock(own, own, causal=True, first=first)
        if node.end < node.last:
            yield AttentionBlock(below, own, causal=False, first=first)


ATTENTION = "agentrl_tree"
"""Its name for transformers: with a row it is what this module says, without one it is SDPA."""

UNKNOWN_TERMS = ("s_aux", "position_bias")


class AttentionTree:
    """Attention in a row, for all layers of a forward pass."""

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
        """Attention of a layer.

        Args:
            query: [1, heads, tokens, size].
            key: [1, key-value heads, tokens, size].
            value: [1, key-value heads, tokens, its size], which is smaller than that of queries in latent attention.
            scale: Multiplies the scores.
            window: Tokens that a token sees, itself included; ``None`` for all.
            cap: What scores are capped at, if they are.
        """
        window = None if window is None or window >= self._longest else window
        if query.device.type == "cpu" and window is None and cap is None:
            attended = node_attention(query, key, _widened(value, query), self._blocks, scale=scale)
            return attended[..., : value.shape[-1]]
        if query.device.type == "cuda":
            if len(self._starts) == len(self.nodes) and has_flash(query.dtype):
                packed = self._flash(query, key, _widened(value, query), scale, window, cap)
                return packed[..., : value.shape[-1]]
            options: dict[str, Any] = {"block_mask": self.block_mask(window), "scale": scale, "enable_gqa": True}
            return cast("Tensor", _compiled_flex()(query, key, value, score_mod=_capping(cap), **options))
        mask = self.mask(window)
        if cap is not None:
            return capped_attention(query, key, value, mask, scale=scale, cap=cap)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)

    def sees(self, window: int | None, queries: Tensor, keys: Tensor) -> Tensor:
        """Tell which tokens may attend to which; int64 indices of any shapes that broadcast."""
        seen = (keys <= queries) & (queries < self._ends[keys])
        if window is not None:
            seen = seen & (self._depths[queries] - self._depths[keys] < window)
        return seen

    def mask(self, window: int | None) -> Tensor:
        """All pairs: bool [tokens, tokens]."""
        if window not in self._masks:
            index = torch.arange(len(self._ends), device=self._ends.device)
            self._masks[window] = self.sees(window, index[:, None], index)
        return self._masks[window]

    def block_mask(self, window: int | None) -> BlockMask:
        """The same for flex_attention."""
        if window not in self._block_masks:
            tokens, device = len(self._ends), self._ends.device

            def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return self.sees(window, query, key)

            self._block_masks[window] = create_block_mask(seen, None, None, tokens, tokens, device=str(device))
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
    """Attention in rows that are padded on the right: every token to those before it in its row."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None = None
    ) -> Tensor:
        """Attention of a layer: query [rows, heads, tokens, size], key and value [rows, key-value heads, tokens,
        size]; scores are capped at `cap`, if there is one.
        """
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
    """Attention whose scores are scaled, then capped at ``cap``; shapes as SDPA has them, causal without a mask."""
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.tanh(query @ keys.mT * (scale / cap)) * cap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values


def _widened(value: Tensor, query: Tensor) -> Tensor:
    """Values with zeros behind them, for kernels that want one size; the zeros come out as zeros."""
    missing = query.shape[-1] - value.shape[-1]
    return pad(value, (0, missing)) if missing else value


@functools.cache
def _capping(cap: float | None) -> Callable[..., Tensor] | None:
    """Make the function that flex_attention applies to scores."""
    if cap is None:
        return None

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return capped


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def has_flash(dtype: torch.dtype) -> bool:
    """Return True if FlashAttention is installed, and takes this format."""
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
    """Attention as transformers calls it."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if tree is None and softcap is not None:
        attended = capped_attention(query, key, value, attention_mask, scale=scale, cap=softcap)
        return attended.transpose(1, 2).contiguous(), None
    if tree is None:
        attended, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return attended, None
    if changed := [name for name in UNKNOWN_TERMS if options.get(name) is not None]:
        raise UsageError("this model's attention cannot be packed", got=f"attention with {', '.join(changed)}")
    return tree.attend(query, key, value, scale, sliding_window, softcap).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, tree_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
