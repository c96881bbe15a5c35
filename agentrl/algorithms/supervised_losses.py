"""Losses without an advantage: demonstrated tokens, and a teacher's opinion of the student's own."""

from __future__ import annotations

import torch

from agentrl.algorithms.divergence import KLEstimator, kl_divergence
from agentrl.algorithms.given import given
from agentrl.algorithms.loss_input import LossInput, TokenLoss, unclipped
from agentrl.algorithms.marks import Input, chooses, ignores_advantage, needs

LEAST_REST = 1e-6
"""Probability of the tokens that are not among the most probable ones, at least: rounding may leave none."""


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


@needs(Input.TEACHER_TOP)
@ignores_advantage
def distill_top_k(tokens: LossInput) -> TokenLoss:
    """KL(teacher, pi) over the teacher's k most probable tokens and all others as one (GKD, arXiv 2306.13649).

    sum_v p(v) (log p(v) - log pi(v)), v being these tokens, and the rest of the vocabulary with what they leave: 0 only
    where the policy gives each of them what the teacher does. With all tokens it is the forward KL.
    """
    teacher = with_rest(given(tokens.teacher_top_logp, Input.TEACHER_TOP))
    own = with_rest(given(tokens.top_logp, Input.TEACHER_TOP))
    return unclipped((teacher.exp() * (teacher - own)).sum(-1))


def with_rest(logp: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [tokens, k] of some tokens, and of all others together: [tokens, k + 1]."""
    known = logp.exp().sum(-1, keepdim=True).clamp(max=1 - LEAST_REST)
    return torch.cat([logp, torch.log1p(-known)], dim=-1)
