"""Losses without an advantage: demonstrated tokens, and a teacher's opinion of the student's own."""

from __future__ import annotations

import torch

from agentrl.algorithms.divergence import KLEstimator, kl_divergence
from agentrl.algorithms.given import given
from agentrl.algorithms.loss_input import LossInput, TokenLoss, unclipped
from agentrl.algorithms.marks import Input, chooses, ignores_advantage, needs, takes


def successes(tokens: LossInput, *, above: float | None = None) -> torch.Tensor:
    """The tokens of episodes with a return above a number, or all: bool [tokens]."""
    if above is None:
        return torch.ones_like(tokens.logp, dtype=torch.bool)
    return tokens.episode_return > above


@chooses(successes, drops=True)
@ignores_advantage
def sft(tokens: LossInput, *, above: float | None = None) -> TokenLoss:
    """-log pi, the cross-entropy of demonstrated tokens.

    Args:
        tokens: The tokens.
        above: Learn only from episodes with a greater return: rejection-sampling fine-tuning (RFT, arXiv 2308.01825).
            What is left out is in no denominator.
    """
    kept = successes(tokens, above=above) if tokens.chosen is None else tokens.chosen
    return TokenLoss(values=torch.where(kept, -tokens.logp, 0.0), clipped=~kept)


@needs(Input.TEACHER)
@ignores_advantage
def distill(tokens: LossInput) -> TokenLoss:
    """KL(pi, teacher) at the student's own tokens: the value of k1, the gradient of k2 (GKD, arXiv 2306.13649)."""
    return unclipped(kl_divergence(KLEstimator.K1_PLUS, tokens.logp, given(tokens.teacher_logp, Input.TEACHER)))


@takes("log-probabilities of a teacher's k most probable tokens at each position")
def distill_top_k(logp: torch.Tensor, teacher_logp: torch.Tensor) -> TokenLoss:
    """sum_v p_teacher(v) (log p_teacher(v) - log pi(v)) over the teacher's k most probable tokens: [tokens, k] each."""
    return unclipped((teacher_logp.exp() * (teacher_logp - logp)).sum(-1))
