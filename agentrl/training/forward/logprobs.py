"""Numbers about tokens from a model's last hidden states: log-probabilities, entropies, top tokens, a critic's values.

The output head runs over chunks of tokens, so that no tensor of [tokens, vocabulary] ever exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.image import ImageReader
from agentrl.models.lora import head_product
from agentrl.models.products import float32_linear, has_float32_head, linear
from agentrl.training.distributed.fsdp import within_forward
from agentrl.training.forward.layout import PADDED, Layout
from agentrl.training.forward.sequences import ScoredSequence

LOGIT_BYTES = 4
"""Of one logit while log-probabilities are computed: float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Scores of wanted tokens under a model; float32 [targets] each."""

    logp: Tensor
    """log_softmax(logits / temperature) at the token."""
    entropy: Tensor
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
    in_float32: bool = False,
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
        in_float32: Compute the logits in float32, of operands in any format.
    """
    function: Any = _HeadScores
    asked = targets[:, None] if others is None else torch.cat([targets[:, None], others], dim=1)
    logp, entropy = function.apply(hidden, weight, bias, asked, temperature, chunk, entropy_gradient, cap, in_float32)
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
    """Compute the logits of hidden states, capped and divided: float32 [n, vocabulary]; see `head_scores`."""
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
    """Sum over the last dimension of the products, which are never stored: [n, 1]."""
    return torch.bmm(left[:, None, :], right[:, :, None]).squeeze(-1)


class ValueHead(nn.Module):
    """A linear map in float32 that begins as 0, so that a new critic expects nothing and changes nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """V of hidden states [n, width], in any format: float32 [n]."""
        return hidden.float() @ self.weight + self.bias


def head_for(model: PreTrainedModel) -> ValueHead:
    """A new head on a model's last hidden states, where the model computes."""
    return ValueHead(cast("int", model.config.get_text_config().hidden_size)).to(model.device)


def score(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    temperature: float,
    pad_id: int,
    layout: Layout = PADDED,
    entropy_gradient: bool = False,
    image_processor: ImageReader | None = None,
    value_head: ValueHead | None = None,
    others: torch.Tensor | None = None,
) -> TokenScores:
    """The wanted tokens of a micro-batch, sequence after sequence; gradients flow unless the caller turned them off.

    Args:
        model: A causal language model; attention sees each sequence from its start.
        sequences: One or more.
        temperature: Divides the logits; 0 counts as 1, as engines do (see `agentrl.engine`).
        pad_id: Any id of the vocabulary.
        layout: How the sequences lie in the forward pass, and the size of the logits that exist at once.
        entropy_gradient: Let gradients flow through the entropy too; without, it is a measurement only.
        image_processor: Prepares images; needed where sequences hold any.
        value_head: Reads values from the same hidden states.
        others: Tokens besides the wanted ones that are asked about: int64 [targets, k]; not where ranks share rows.
    """

    def read(model: PreTrainedModel) -> tuple[torch.Tensor, ...]:
        targets = torch.cat([sequence.targets for sequence in sequences]).to(model.device)
        owner = None
        if layout.context is None:
            hidden = layout.read(model, sequences, pad_id, image_processor)
        else:
            hidden, owner = layout.read_shared(model, sequences, pad_id, layout.context)
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
        together = layout.context.collected(torch.stack(found), owner)
        return tuple(own.clone() for own in together)  # what a model in shards gives back is no view

    logp, entropy, *rest = within_forward(model, read)
    top = rest.pop(0) if others is not None else None
    return TokenScores(logp=logp, entropy=entropy, top_logp=top, values=rest[0] if rest else None)


LARGEST_ID = 1 << 24
"""Above it float32, in which ranks tell each other ids, skips whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherLogprobs:
    """Log-probabilities that a model gives to tokens, and those of the tokens that it would have preferred."""

    logp: torch.Tensor
    """Log-probability of the given tokens: float32 [targets]."""
    top_ids: torch.Tensor | None = None
    """The model's own k most probable tokens there: int64 [targets, k]; ``None`` where they are not asked for."""
    top_logp: torch.Tensor | None = None
    """Their log-probabilities: float32 [targets, k]."""


def read_top_tokens(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    top_k: int,
    temperature: float,
    pad_id: int,
    layout: Layout,
    image_processor: ImageReader | None,
) -> torch.Tensor:
    """Read the most probable tokens of a micro-batch: float32 [1 + 2 k, targets].

    The rows are the log-probabilities of the targets, the ids of the k tokens, and the log-probabilities of these. To
    be called inside the model's forward pass, by ranks that do not share rows.
    """
    targets = torch.cat([sequence.targets for sequence in sequences]).to(model.device)
    head = model.get_output_embeddings()
    hidden, weight = head_product(head, layout.read(model, sequences, pad_id, image_processor))
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
