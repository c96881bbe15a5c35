"""Log-probabilities and entropies behind the output head, whose logits exist for a chunk of tokens only.

With logits z = (W h + b) / temperature, p = softmax(z) and H = -sum(p log p), for a token t:

    d log p_t / dz = onehot(t) - p          d H / dz = -p (log p + H)

Models that cap their logits have z = c tanh((W h + b) / c) / temperature, whose derivative by W h + b is
(1 - tanh^2) / temperature.

The forward pass keeps log(sum(exp(z))) and H of each token; the backward pass computes each chunk's logits once more
and adds up what they give. Where everything fits into one chunk, its probabilities are kept instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LOGIT_BYTES = 4
"""Of one logit while log-probabilities are computed: float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What the policy says about wanted tokens; float32 [targets] each."""

    logp: Tensor
    """log_softmax(logits / temperature) at the token."""
    entropy: Tensor
    """Entropy of that distribution, in nats."""
    top_logp: Tensor | None = None
    """log_softmax(logits / temperature) at other tokens that were asked about: [targets, k]."""
    values: Tensor | None = None
    """What a critic that shares the policy's hidden states expects before the token."""


def chunk_tokens(vocabulary: int, megabytes: int) -> int:
    """Tokens whose logits fit into a budget; at least one.

    >>> chunk_tokens(150_000, 64)
    111
    """
    return max(1, (megabytes << 20) // (vocabulary * LOGIT_BYTES))


def head_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
    cap: float | None = None,
    others: Tensor | None = None,
) -> TokenScores:
    """Scores of `targets`.

    Args:
        hidden: Last hidden states, [n, width].
        weight: The head's, [vocabulary, width].
        bias: [vocabulary], if the head has one.
        targets: int64 [n].
        temperature: Divides the logits.
        chunk: Tokens whose logits exist at once.
        entropy_gradient: Let gradients flow through the entropy too; without, it is a measurement only.
        cap: What logits are capped at before they are divided, if they are.
        others: Tokens besides the target that are asked about at each position: int64 [n, k].
    """
    function: Any = _HeadScores
    asked = targets[:, None] if others is None else torch.cat([targets[:, None], others], dim=1)
    logp, entropy = function.apply(hidden, weight, bias, asked, temperature, chunk, entropy_gradient, cap)
    top = None if others is None else logp[:, 1:].clone()
    return TokenScores(logp=logp[:, 0].clone(), entropy=entropy, top_logp=top)  # what shards give back is no view


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy_gradient: bool,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        entropy, total = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(2))
        logp = hidden.new_empty(targets.shape, dtype=torch.float32)
        keeps = len(targets) <= chunk and any(ctx.needs_input_grad) and cap is None
        kept = None
        for first in range(0, len(targets), chunk):
            part = slice(first, first + chunk)
            logits = head_logits(hidden[part], weight, bias, temperature, cap)
            most = logits.amax(-1, keepdim=True)
            at_target = logits.gather(-1, targets[part])
            exponentials = logits.sub_(most).exp()
            sums = exponentials.sum(-1, keepdim=True)
            total[part] = (most + sums.log()).squeeze(-1)
            logp[part] = at_target - total[part, None]
            entropy[part] = (sums.log() - _dot(exponentials, logits) / sums).squeeze(-1)
            kept = exponentials.div_(sums) if keeps else None
            del logits, exponentials
        ctx.save_for_backward(hidden, weight, bias, targets, total, entropy, kept)
        ctx.temperature, ctx.chunk, ctx.entropy_gradient, ctx.cap = temperature, chunk, entropy_gradient, cap
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(
        ctx: Any, logp_gradient: Tensor, entropy_gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, bias, targets, total, entropy, kept = ctx.saved_tensors
        by_hidden, by_weight, by_bias = (
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        for first in range(0, len(targets), ctx.chunk):
            part = slice(first, first + ctx.chunk)
            steepness = None
            if kept is None:
                logits = head_logits(hidden[part], weight, bias, ctx.temperature, ctx.cap)
                if ctx.cap is not None:
                    steepness = 1 - (logits * (ctx.temperature / ctx.cap)).square_()
                probabilities = logits.sub_(total[part, None]).exp_()
            else:
                probabilities = kept
            by_entropy = entropy_gradient[part] if ctx.entropy_gradient else None
            by_logits = _by_logits(probabilities, targets[part], logp_gradient[part], by_entropy, entropy[part])
            by_logits = by_logits.div_(ctx.temperature)
            by_logits = (by_logits if steepness is None else by_logits.mul_(steepness)).to(weight.dtype)
            if by_hidden is not None:
                torch.mm(by_logits, weight, out=by_hidden[part])
            if by_weight is not None:
                by_weight.addmm_(by_logits.mT, hidden[part])
            if by_bias is not None:
                by_bias += by_logits.sum(0)
            del probabilities, by_logits, steepness
        return by_hidden, by_weight, by_bias, None, None, None, None, None


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, cap: float | None) -> Tensor:
    """What the head says to hidden states, capped and divided: float32 [n, vocabulary]; see `head_scores`."""
    logits = functional.linear(hidden, weight, bias).float()
    if cap is not None:
        logits = logits.div_(cap).tanh_().mul_(cap)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _by_logits(
    probabilities: Tensor, targets: Tensor, by_logp: Tensor, by_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    factor = by_logp.sum(-1) if by_entropy is None else by_logp.sum(-1) + by_entropy * entropy
    gradient = probabilities * -factor[:, None]
    if by_entropy is not None:
        gradient.addcmul_(torch.special.entr(probabilities), by_entropy[:, None])
    return gradient.scatter_add_(-1, targets, by_logp)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Sum over the last dimension of the products, which are never stored: [n, 1]."""
    return torch.bmm(left[:, None, :], right[:, :, None]).squeeze(-1)
