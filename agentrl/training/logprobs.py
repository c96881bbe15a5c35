"""Log-probabilities of given tokens without a tensor of [tokens, vocabulary]: the head runs over chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentrl.algorithms.entropy import entropy
from agentrl.image import ImageReader
from agentrl.lanes import Lanes
from agentrl.training.batching import pad
from agentrl.training.micro_batch_gradients import cut
from agentrl.training.ranks import Ranks
from agentrl.training.ranks.sharding import reshard, within_forward
from agentrl.training.ranks.shares import share_of
from agentrl.training.sequences import ScoredSequence
from agentrl.vision_model import hidden_states


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What the policy says about wanted tokens; float32 [targets] each."""

    logp: torch.Tensor
    """log_softmax(logits / temperature) at the token."""
    entropy: torch.Tensor
    """Entropy of that distribution, in nats."""


def score(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    temperature: float,
    pad_id: int,
    chunk: int,
    entropy_gradient: bool = False,
    reader: ImageReader | None = None,
) -> TokenScores:
    """The wanted tokens of a micro-batch, sequence after sequence; gradients flow unless the caller turned them off.

    Args:
        model: A causal language model; attention sees each sequence from its start.
        sequences: One or more.
        temperature: Divides the logits; 0 counts as 1, as engines do (see `agentrl.policy`).
        pad_id: Any id of the vocabulary.
        chunk: Tokens whose logits exist at once.
        entropy_gradient: Let gradients flow through the entropy too; without, it is a measurement only.
        reader: Prepares images; needed where sequences hold any.
    """
    logp, entropies = within_forward(
        model,
        _read,
        sequences,
        temperature=temperature,
        pad_id=pad_id,
        chunk=chunk,
        entropy_gradient=entropy_gradient,
        reader=reader,
    )
    return TokenScores(logp=logp, entropy=entropies)


def _read(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    temperature: float,
    pad_id: int,
    chunk: int,
    entropy_gradient: bool,
    reader: ImageReader | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch = pad(sequences, pad_id)
    hidden = hidden_states(model, batch.input_ids.to(model.device), batch.images, reader)
    wanted = hidden.flatten(0, 1)[batch.positions.to(model.device)]
    head = model.get_output_embeddings()
    scores = chunked_scores(
        wanted,
        head.weight,
        head.bias,
        batch.targets.to(model.device),
        temperature=temperature or 1.0,
        chunk=chunk,
        entropy_gradient=entropy_gradient,
    )
    return scores.logp, scores.entropy


def score_all(
    model: PreTrainedModel,
    sequences: Sequence[ScoredSequence],
    *,
    temperature: float,
    pad_id: int,
    chunk: int,
    budget: int,
    lanes: Lanes,
    ranks: Ranks | None = None,
    reader: ImageReader | None = None,
) -> torch.Tensor:
    """Log-probabilities of the wanted tokens of any number of sequences, without gradients: float32 [targets].

    Args:
        model: See `score`, also for the other arguments.
        sequences: One or more; the result is in their order.
        temperature: Divides the logits.
        pad_id: Any id of the vocabulary.
        chunk: Tokens whose logits exist at once.
        budget: Padded tokens of a forward pass.
        lanes: Compute the forward passes.
        ranks: Share them out; all get the result.
        reader: Prepares images.
    """
    ranks = ranks or Ranks()
    work = cut(range(len(sequences)), [len(sequence) for sequence in sequences], budget=budget, learns=False)
    own = share_of(work, rank=ranks.rank, ranks=ranks.count)

    def compute(indices: list[int]) -> dict[int, torch.Tensor]:
        part = [sequences[i] for i in indices]
        with torch.no_grad():
            scores = score(model, part, temperature=temperature, pad_id=pad_id, chunk=chunk, reader=reader)
        return dict(zip(indices, torch.split(scores.logp, [s.targets.numel() for s in part]), strict=True))

    found: dict[int, torch.Tensor] = {}
    for scores in lanes.run(compute, [micro_batch.sequences for micro_batch in own]):
        found.update(scores)
    reshard(model)
    unknown = [torch.full(sequence.targets.shape, math.nan, device=model.device) for sequence in sequences]
    return ranks.filled(torch.cat([found.get(i, unknown[i]) for i in range(len(sequences))]))


def chunked_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Scores of `targets` [n] from hidden states [n, width] and the head's weight [vocabulary, width].

    Logits are kept for one chunk only; with more than one chunk the backward pass computes them again.
    """
    arguments = [
        (states, weight, bias, wanted, temperature, entropy_gradient)
        for states, wanted in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
    ]
    if len(arguments) > 1 and torch.is_grad_enabled():
        parts = [checkpoint(_scores, *chunk_arguments, use_reentrant=False) for chunk_arguments in arguments]
    else:
        parts = [_scores(*chunk_arguments) for chunk_arguments in arguments]
    return TokenScores(logp=torch.cat([part[0] for part in parts]), entropy=torch.cat([part[1] for part in parts]))


def _scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = functional.linear(hidden, weight, bias).float() / temperature
    distribution = torch.log_softmax(logits, dim=-1)
    logp = distribution.gather(-1, targets[:, None]).squeeze(-1)
    return logp, entropy(distribution if entropy_gradient else distribution.detach())
