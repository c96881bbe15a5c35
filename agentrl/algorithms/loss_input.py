"""What a policy loss is given and what it gives back, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """Sampled tokens of whole sequences (one micro-batch); all tensors are [tokens]."""

    logp: torch.Tensor
    """log pi of the current policy; the gradient flows through it."""
    old_logp: torch.Tensor
    """log pi_old of the proximal policy: the trainer's own, at the start of the step."""
    behaviour_logp: torch.Tensor
    """log mu of the behaviour policy: what the engine returned when it sampled."""
    advantage: torch.Tensor
    sequence: torch.Tensor
    """Sequence of each token: int64, from 0 to `sequences` - 1; no sequence is split over two inputs."""
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """The loss of each token, before correction weights and aggregation."""

    values: torch.Tensor
    """[tokens], to be minimised."""
    clipped: torch.Tensor
    """Bool [tokens]: a clip took the token's gradient away or bounded its weight."""


def log_ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Log of a ratio of probabilities, clamped to [-20, 20] so that its exponential is finite."""
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
