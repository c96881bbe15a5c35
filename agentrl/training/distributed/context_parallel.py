"""Context parallelism: several ranks share the tokens of a row, and turn them into heads where tokens meet.

    rank 0   tokens 0 1 2, all heads ─┐            ┌─ all tokens, heads 0 1 ─ attention ─┐            ┌─ tokens 0 1 2
    rank 1   tokens 3 4 5, all heads ─┴ all-to-all ┴─ all tokens, heads 2 3 ─ attention ─┴ all-to-all ┴─ tokens 3 4 5

Everything but attention looks at single tokens, so that packing, common prefixes and masks are what they are on one
rank (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509). Key-value heads that are fewer than the ranks, or that do
not divide among them, are repeated first: as often as is needed, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, distributed

from agentrl.errors import UsageError


class Attention(Protocol):
    """Attention of a forward pass: which tokens attend to which."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None = None
    ) -> Tensor:
        """Attention of a layer: query [rows, heads, tokens, size], key and value [rows, key-value heads, tokens,
        size]; scores are capped at `cap`, if there is one.
        """


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that share rows, as one of them sees them."""

    group: distributed.ProcessGroup
    rank: int
    count: int

    def padded(self, tokens: int) -> int:
        """The next length that can be shared evenly."""
        return -(-tokens // self.count) * self.count

    def own(self, tokens: int) -> slice:
        """This rank's part of a row of so many tokens, which all ranks can share evenly."""
        part = tokens // self.count
        return slice(self.rank * part, (self.rank + 1) * part)

    def by_heads(self, tensor: Tensor) -> Tensor:
        """[rows, heads, own tokens, size] to [rows, own heads, all tokens, size]."""
        return _swap(tensor, self.group, self.count, 1, 2)

    def by_tokens(self, tensor: Tensor) -> Tensor:
        """[rows, own heads, all tokens, size] to [rows, heads, own tokens, size]."""
        return _swap(tensor, self.group, self.count, 2, 1)

    def collected(self, own: Tensor, owner: Tensor) -> Tensor:
        """What all ranks know: each gives the columns that are its own and gets all; gradients go to the own ones only.

        All ranks must do the same with the result: its gradient is not added up.

        Args:
            own: [rows, own columns].
            owner: The rank of each column: int64 [columns].
        """
        function: Any = _Collected
        return cast("Tensor", function.apply(own, owner, self))

    def total(self, own: Tensor) -> Tensor:
        """The sum of what all ranks have; the gradient goes to the own part of it."""
        everything = own.detach().clone()
        distributed.all_reduce(everything, group=self.group)
        return own + (everything - own.detach())


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Attention of tokens that several ranks hold a part of each."""

    attention: Attention
    context: ContextGroup

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None = None
    ) -> Tensor:
        """Attend as `Attention.attend` does, for this rank's tokens."""
        copies = key_value_copies(query.shape[1], key.shape[1], self.context.count)
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        query, key, value = (self.context.by_heads(tensor) for tensor in (query, key, value))
        return self.context.by_tokens(self.attention.attend(query, key, value, scale, window, cap))


def key_value_copies(heads: int, key_value_heads: int, ranks: int) -> int:
    """Count how often each key-value head is repeated, so that every rank has those that its query heads look at.

    >>> key_value_copies(8, 4, ranks=2), key_value_copies(8, 2, ranks=4), key_value_copies(6, 3, ranks=2)
    (1, 2, 2)
    """
    if heads % ranks:
        raise UsageError(
            "the model's attention heads cannot be shared by trainer.context_parallel",
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
    """Every rank gives each other one a part of one dimension, and joins what it gets in another one."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: distributed.ProcessGroup, count: int, split: int, joined: int
    ) -> Tensor:
        ctx.way = group, count, split, joined
        return _exchanged(tensor, group, count, split, joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        group, count, split, joined = ctx.way
        return _exchanged(gradient, group, count, joined, split), None, None, None, None


def _exchanged(tensor: Tensor, group: distributed.ProcessGroup, count: int, split: int, joined: int) -> Tensor:
    given = torch.stack(tensor.chunk(count, split))
    taken = torch.empty_like(given)
    distributed.all_to_all_single(taken, given, group=group)
    return torch.cat(taken.unbind(), joined)


class _Collected(torch.autograd.Function):
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
