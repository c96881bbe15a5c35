"""Attention over a packed row on the CPU, node by node of its trie.

Each node attends to itself causally, and everything below it attends to the node as a whole: no mask is built and
nothing is computed twice. The parts of a token's attention are merged by their log-sum-exp as in
https://arxiv.org/abs/2205.14135; the gradient of each part follows from the merged output and log-sum-exp alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from agentrl.training.scoring.prefix_tree import Node

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
    """Attention of a layer, [1, heads, tokens, size], with torch's fused kernels for the CPU.

    Args:
        query: [1, heads, tokens, size].
        key: [1, key-value heads, tokens, size].
        value: As `key`.
        blocks: Who attends to whom.
        scale: Multiplies the scores.
    """
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


def attention_blocks(nodes: Sequence[Node]) -> Iterator[AttentionBlock]:
    """Who attends to whom in a row, a node at a time: itself, then everything below it."""
    tree_end = 0
    for node in nodes:
        first = node.start >= tree_end
        tree_end = max(tree_end, node.last)
        own, below = slice(node.start, node.end), slice(node.end, node.last)
        yield AttentionBlock(own, own, causal=True, first=first)
        if node.end < node.last:
            yield AttentionBlock(below, own, causal=False, first=first)
