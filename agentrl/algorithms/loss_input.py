"""What a policy loss is given and what it gives back, token by token."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

LOG_RATIO_LIMIT = 20.0
"""Bound of a token's log-ratio, as in verl."""

MEAN_LOG_RATIO_LIMIT = 10.0
"""Upper bound of a sequence's mean log-ratio in `agentrl.algorithms.policy_losses.gspo` and ``gmpo``, as in verl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """Sampled tokens of whole sequences (one micro-batch); all tensors are [tokens] where nothing else is said.

    A loss is given the tokens that train. Those that a filter or the correction rejects are not among them, so that no
    ratio, mean or share of a sequence depends on a rejected token.
    """

    logp: torch.Tensor
    """log pi of the current policy; the gradient flows through it."""
    old_logp: torch.Tensor
    """log pi_old of the proximal policy: the trainer's own, at the start of the step."""
    behaviour_logp: torch.Tensor
    """log mu of the behaviour policy: what the engine returned when it sampled."""
    advantage: torch.Tensor
    episode_return: torch.Tensor
    """R of the episode that the token belongs to, after shaping."""
    sequence: torch.Tensor
    """Sequence of each token: int64, from 0 to `sequences` - 1; no sequence is split over two inputs."""
    sequences: int
    reference_logp: torch.Tensor | None = None
    """log pi_ref of a frozen policy."""
    teacher_logp: torch.Tensor | None = None
    """log-probability that a teacher gives the token."""
    teacher_top_logp: torch.Tensor | None = None
    """log-probabilities that a teacher gives the k tokens that it finds most probable in the token's place: [tokens,
    k]."""
    top_logp: torch.Tensor | None = None
    """log pi of these tokens: [tokens, k]; the gradient flows through it."""
    expert: torch.Tensor | None = None
    """Bool: an expert wrote the token; its log mu and log pi_old mean nothing."""
    entropy: torch.Tensor | None = None
    """Entropy of the proximal policy at the token, in nats; filters read it."""
    chosen: torch.Tensor | None = None
    """Bool: the loss's own choice among all tokens of the update (`agentrl.algorithms.marks.chooses`). Without it the
    tokens given are taken for all."""
    draw: int = 0
    """Seed of a loss's random choices: another one in every update, the same on all ranks and in all micro-batches."""

    @property
    def ratio(self) -> torch.Tensor:
        """R = pi / pi_old: [tokens]."""
        return log_ratio(self.logp, self.old_logp).exp()

    def select(self, index: torch.Tensor) -> LossInput:
        """Some of the tokens: index int64 [selected], or bool [tokens]."""
        parts: dict[str, Any] = {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}
        chosen = {name: part[index] for name, part in parts.items() if isinstance(part, torch.Tensor)}
        return LossInput(**{**parts, **chosen})


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


def unclipped(values: torch.Tensor) -> TokenLoss:
    """A loss without a clip."""
    return TokenLoss(values=values, clipped=torch.zeros_like(values, dtype=torch.bool))
