"""Agreement of an engine with the trainer: comparison of the probabilities of sampled tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from agentrl.training.forward.logprobs import score
from agentrl.training.forward.sequences import scored_sequence
from agentrl.trajectory import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Differences of sampled tokens' probabilities under the engine (mu) and the trainer (pi)."""

    tokens: int
    mean: float
    """Mean of |pi - mu|."""
    largest: float
    """Maximum of |pi - mu|."""


@torch.no_grad()
def measure_agreement(
    model: PreTrainedModel, sequences: Iterable[TokenSequence], *, temperature: float, most_tokens: int
) -> Agreement | None:
    """Compare engine and trainer on recorded sequences.

    Args:
        model: The trainer's model.
        sequences: Sequences with the engine's log-probabilities.
        temperature: Sampling temperature.
        most_tokens: Number of compared tokens after which the comparison stops.

    Returns:
        The differences, or ``None`` if no token was sampled.
    """
    pi, mu = [], []
    compared = 0
    for sequence in sequences:
        sampled = sequence.loss_mask
        if compared >= most_tokens or not sampled.any():
            continue
        scored = scored_sequence(sequence.token_ids, sampled)
        pi.append(score(model, [scored], temperature=temperature).logp.exp().cpu())
        mu.append(torch.from_numpy(sequence.logprobs[sampled]).exp())
        compared += int(sampled.sum())
    if not compared:
        return None
    difference = (torch.cat(pi) - torch.cat(mu)).abs()
    return Agreement(tokens=compared, mean=float(difference.mean()), largest=float(difference.max()))
