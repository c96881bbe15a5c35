"""Scores of tokens from a model's last hidden states: log-probabilities, entropies, top tokens, a critic's values.

The output head runs over chunks of tokens, so that a tensor of [tokens, vocabulary] never exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.message.image import ImageReader
from agentrl.models.lora import head_product
from agentrl.models.matrix_products import float32_linear, has_float32_head, linear
from agentrl.training.distributed.fsdp import within_forward
from agentrl.training.forward.layout import PADDED, Layout
from agentrl.training.forward.sequences import ScoredSequence

LOGIT_BYTES = 4
"""Bytes of a logit while log-probabilities are computed (float32)."""
MAX_EXACT_ID = 1 << 24
"""Maximum token id that ranks can exchange as float32, which cannot represent all larger integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Scores of target tokens under a model; float32 [targets] each."""

    logp: Tensor
    """log_softmax(logits / temperature) of the target token."""
    entropy: Tensor
    """Entropy of softmax(logits / temperature)."""
    top_logp: Tensor | None = None
    """log_softmax(logits / temperature) of other requested tokens: [targets, k]."""
    values: Tensor | None = None
    """Values before the token from a critic that shares the policy's hidden states."""


def chunk_tokens(vocabulary: int, megabytes: int) -> int:
    """Compute the number of tokens whose logits fit into a budget in MiB; at least one.

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
    in_float32: bool = False,
) -> TokenScores:
    """Score `targets` with an output head.

    Args:
        hidden: Last hidden states: [n, width].
        weight: Weight of the head: [vocabulary, width].
        bias: Bias of the head, if it has one: [vocabulary].
        targets: Target tokens: int64 [n].
        temperature: Divisor of the logits.
        chunk: Number of tokens whose logits exist at once.
        entropy_gradient: True to let gradients flow through the entropy.
        cap: Value at which logits are softly capped before they are divided, if any.
        others: Further tokens to score at each position: int64 [n, k].
        in_float32: True to compute the logits in float32, from operands in any format.
    """
    function: Any = _HeadScores
    tokens = targets[:, None] if others is None else torch.cat([targets[:, None], others], dim=1)
    logp, entropy = function.apply(hidden, weight, bias, tokens, temperature, chunk, entropy_gradient, cap, in_float32)
    top = None if others is None else logp[:, 1:].clone()
    return TokenScores(logp=logp[:, 0].clone(), entropy=entropy, top_logp=top)  # FSDP does not accept views as outputs


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
        in_float32: bool,
    ) -> tuple[Tensor, Tensor]:
        entropy, total = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(2))
        logp = hidden.new_empty(targets.shape, dtype=torch.float32)
        keeps = len(targets) <= chunk and any(ctx.needs_input_grad) and cap is None
        kept = None
        for first in range(0, len(targets), chunk):
            part = slice(first, first + chunk)
            logits = head_logits(hidden[part], weight, bias, temperature, cap, in_float32=in_float32)
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
        ctx.in_float32 = in_float32
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(
        ctx: Any, logp_gradient: Tensor, entropy_gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None, None, None]:
        hidden, weight, bias, targets, total, entropy, kept = ctx.saved_tensors
        by_hidden, by_weight, by_bias = (
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        for first in range(0, len(targets), ctx.chunk):
            part = slice(first, first + ctx.chunk)
            steepness = None
            if kept is None:
                logits = head_logits(hidden[part], weight, bias, ctx.temperature, ctx.cap, in_float32=ctx.in_float32)
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
        return by_hidden, by_weight, by_bias, None, None, None, None, None, None


def head_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    cap: float | None,
    *,
    in_float32: bool = False,
) -> Tensor:
    """Compute logits from hidden states, capped and divided by the temperature: float32 [n, vocabulary]."""
    logits = float32_linear(hidden, weight, bias) if in_float32 else linear(hidden, weight, bias).float()
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
    """Compute the dot products over the last dimension, without storing the elementwise products: [n, 1]."""
    return torch.bmm(left[:, None, :], right[:, :, None]).squeeze(-1)


class ValueHead(nn.Module):
    """A linear map in float32, initialized to 0, so that a new critic predicts 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute V from hidden states [n, width] in any format: float32 [n]."""
        return hidden.float() @ self.weight + self.bias


def head_for(model: PreTrainedModel) -> ValueHead:
    """Make a new head for a model's last hidden states, on the model's device."""
    return ValueHead(cast("int", model.config.get_text_config().hidden_size)).to(model.device)


def score(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    temperature: float,
    layout: Layout = PADDED,
    entropy_gradient: bool = False,
    image_processor: ImageReader | None = None,
    value_head: ValueHead | None = None,
    others: torch.Tensor | None = None,
) -> TokenScores:
    """Score the target tokens of a micro-batch, sequence after sequence; gradients flow if they are enabled.

    Args:
        model: A causal language model.
        sequences: At least one sequence.
        temperature: Divisor of the logits; 0 counts as 1, as in engines (see `agentrl.engine`).
        layout: Layout of the sequences in the forward pass, and memory of the logits that exist at once.
        entropy_gradient: True to let gradients flow through the entropy.
        image_processor: Image processor; required if sequences contain images.
        value_head: Value head to apply to the same hidden states.
        others: Further tokens to score at each target: int64 [targets, k]; not supported if ranks share rows.
    """

    def compute(model: PreTrainedModel) -> tuple[torch.Tensor, ...]:
        targets = torch.cat([sequence.targets for sequence in sequences]).to(model.device)
        owner = None
        if layout.context is None:
            hidden = layout.hidden_states(model, sequences, image_processor)
        else:
            hidden, owner = layout.shared_hidden_states(model, sequences, layout.context)
            targets = targets[owner == layout.context.rank]
        head = model.get_output_embeddings()
        inputs, weight = head_product(head, hidden)
        scores = head_scores(
            inputs,
            weight,
            head.bias,
            targets,
            temperature=temperature or 1.0,
            chunk=chunk_tokens(weight.shape[0], layout.logits_megabytes),
            entropy_gradient=entropy_gradient,
            cap=getattr(model.config.get_text_config(), "final_logit_softcapping", None),
            others=others,
            in_float32=has_float32_head(model.config),
        )
        found = [scores.logp, scores.entropy]
        if scores.top_logp is not None:
            found.append(scores.top_logp)
        if value_head is not None:
            found.append(value_head(hidden))
        if layout.context is None or owner is None:
            return tuple(found)
        together = layout.context.gather_columns(torch.stack(found), owner)
        return tuple(own.clone() for own in together)  # FSDP does not accept views as outputs

    logp, entropy, *rest = within_forward(model, compute)
    top = rest.pop(0) if others is not None else None
    return TokenScores(logp=logp, entropy=entropy, top_logp=top, values=rest[0] if rest else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherLogprobs:
    """A teacher's log-probabilities of given tokens and of its most probable tokens."""

    logp: torch.Tensor
    """Log-probabilities of the given tokens: float32 [targets]."""
    top_ids: torch.Tensor | None = None
    """The teacher's k most probable tokens at each position: int64 [targets, k]; ``None`` if not requested."""
    top_logp: torch.Tensor | None = None
    """Log-probabilities of `top_ids`: float32 [targets, k]."""


def top_token_scores(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    top_k: int,
    temperature: float,
    layout: Layout,
    image_processor: ImageReader | None,
) -> torch.Tensor:
    """Find the most probable tokens at each target of a micro-batch: float32 [1 + 2 k, targets].

    The rows are the log-probabilities of the targets, the ids of the k most probable tokens, and the log-probabilities
    of these. Must be called by `within_forward`, and not with ranks that share rows.
    """
    targets = torch.cat([sequence.targets for sequence in sequences]).to(model.device)
    head = model.get_output_embeddings()
    hidden, weight = head_product(head, layout.hidden_states(model, sequences, image_processor))
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    chunk = chunk_tokens(weight.shape[0], layout.logits_megabytes)
    found = []
    for first in range(0, len(targets), chunk):
        part = slice(first, first + chunk)
        logits = head_logits(
            hidden[part], weight, head.bias, temperature, cap, in_float32=has_float32_head(model.config)
        )
        total = logits.logsumexp(-1, keepdim=True)
        best, ids = logits.topk(top_k, dim=-1)
        of_targets = logits.gather(-1, targets[part, None]) - total
        found.append(torch.cat([of_targets, ids.float(), best - total], dim=1))
        del logits
    return torch.cat(found).mT.contiguous()
