"""Context parallelism: several ranks share the tokens of a row; for attention, they exchange tokens for heads.

    rank 0   tokens 0 1 2, all heads ─┐            ┌─ all tokens, heads 0 1 ─ attention ─┐            ┌─ tokens 0 1 2
    rank 1   tokens 3 4 5, all heads ─┴ all-to-all ┴─ all tokens, heads 2 3 ─ attention ─┴ all-to-all ┴─ tokens 3 4 5

Everything except attention works on single tokens, so packing, common prefixes and masks are the same as on one rank
(DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509). If there are fewer key-value heads than ranks, or their number is
not divisible by the ranks, they are repeated as few times as possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, distributed

from agentrl.errors import UsageError


class Attention(Protocol):
    """Attention of a forward pass, which determines the tokens that attend to each other."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None = None
    ) -> Tensor:
        """Compute a layer's attention; scores are capped at `cap`, if given.

        Shapes: query [rows, heads, tokens, size], key and value [rows, key-value heads, tokens, size].
        """


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """Ranks that share rows, from the view of one of them."""

    group: distributed.ProcessGroup
    rank: int
    count: int

    def padded_length(self, tokens: int) -> int:
        """Round a length up to a multiple of the number of ranks."""
        return -(-tokens // self.count) * self.count

    def own(self, tokens: int) -> slice:
        """Return this rank's part of a row of `tokens` tokens, a multiple of the number of ranks."""
        part = tokens // self.count
        return slice(self.rank * part, (self.rank + 1) * part)

    def by_heads(self, tensor: Tensor) -> Tensor:
        """Exchange tokens for heads: [rows, heads, own tokens, size] to [rows, own heads, all tokens, size]."""
        return _swap(tensor, self.group, self.count, 1, 2)

    def by_tokens(self, tensor: Tensor) -> Tensor:
        """Exchange heads for tokens: [rows, own heads, all tokens, size] to [rows, heads, own tokens, size]."""
        return _swap(tensor, self.group, self.count, 2, 1)

    def gather_columns(self, own: Tensor, owner: Tensor) -> Tensor:
        """All-gather columns: [rows, columns]; gradients reach only this rank's columns.

        Gradients are not added up over ranks, so all ranks must compute the same from the result.

        Args:
            own: This rank's columns: [rows, own columns].
            owner: Rank of each column: int64 [columns].
        """
        function: Any = _GatherColumns
        return cast("Tensor", function.apply(own, owner, self))

    def total(self, own: Tensor) -> Tensor:
        """Sum a tensor over all ranks; the gradient reaches only this rank's part."""
        everything = own.detach().clone()
        distributed.all_reduce(everything, group=self.group)
        return own + (everything - own.detach())


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Attention over tokens that are divided among several ranks."""

    attention: Attention
    context: ContextGroup

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None = None
    ) -> Tensor:
        """Compute attention for this rank's tokens; see `Attention.attend`."""
        copies = key_value_copies(query.shape[1], key.shape[1], self.context.count)
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        query, key, value = (self.context.by_heads(tensor) for tensor in (query, key, value))
        return self.context.by_tokens(self.attention.attend(query, key, value, scale, window, cap))


def key_value_copies(heads: int, key_value_heads: int, ranks: int) -> int:
    """Compute how often to repeat each key-value head, so that every rank has those that its query heads need.

    >>> key_value_copies(8, 4, ranks=2), key_value_copies(8, 2, ranks=4), key_value_copies(6, 3, ranks=2)
    (1, 2, 2)
    """
    if heads % ranks:
        raise UsageError(
            "trainer.context_parallel must divide the number of attention heads",
            got=f"{heads} heads, {ranks} ranks",
            expected="a divisor of the number of heads",
            hint="trainer.tensor_parallel divides the heads first",
        )
    group = heads // key_value_heads
    return next(copies for copies in range(1, group + 1) if not group % copies and not key_value_heads * copies % ranks)


def _swap(tensor: Tensor, group: distributed.ProcessGroup, count: int, split: int, joined: int) -> Tensor:
    function: Any = _AllToAll
    return cast("Tensor", function.apply(tensor, group, count, split, joined))


class _AllToAll(torch.autograd.Function):
    """All-to-all that splits one dimension over ranks and concatenates another."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: distributed.ProcessGroup, count: int, split: int, joined: int
    ) -> Tensor:
        ctx.way = group, count, split, joined
        return _exchange(tensor, group, count, split, joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        group, count, split, joined = ctx.way
        return _exchange(gradient, group, count, joined, split), None, None, None, None


def _exchange(tensor: Tensor, group: distributed.ProcessGroup, count: int, split: int, joined: int) -> Tensor:
    sent = torch.stack(tensor.chunk(count, split))
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), joined)


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, owner: Tensor, context: ContextGroup) -> Tensor:
        ctx.mine = owner == context.rank
        counts = torch.bincount(owner, minlength=context.count).tolist()
        sent = own.new_zeros(own.shape[0], max(counts))
        sent[:, : own.shape[1]] = own
        found = [torch.empty_like(sent) for _ in counts]
        distributed.all_gather(found, sent, group=context.group)
        every = own.new_empty(own.shape[0], len(owner))
        for rank, (part, count) in enumerate(zip(found, counts, strict=True)):
            every[:, owner == rank] = part[:, :count]
        return every

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[:, ctx.mine], None, None
