"""Losses for off-policy data: stale tokens, regressions instead of surrogates, demonstrations, a teacher, pairs of
trajectories, and outcomes (the reward model of PRIME).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from agentrl.algorithms.kl import KLEstimator, kl_divergence
from agentrl.algorithms.options import Positive
from agentrl.algorithms.segments import exceeds, segment_sum
from agentrl.algorithms.traits import (
    Input,
    advantage_weighted,
    chooses,
    ignores_advantage,
    needs,
    takes,
)
from agentrl.algorithms.types import LossInput, TokenLoss, log_ratio, plain_loss, require


@advantage_weighted
def topr(tokens: LossInput) -> TokenLoss:
    """-A log pi where R > 0, else -sg(clip(r, 0, 1)) A log pi (TOPR, arXiv 2503.14286)."""
    ratio = tokens.ratio.detach()
    good = exceeds(tokens.episode_return, 0.0)
    weight = torch.where(good, 1.0, ratio.clamp(0.0, 1.0))
    return TokenLoss(values=-weight * tokens.advantage * tokens.logp, clipped=~good & (ratio > 1.0))


def kimi(tokens: LossInput, *, tau: Positive = 0.1) -> TokenLoss:
    """-A log pi + (tau / 2)(log pi - log pi_old)^2, tau = 0.1 (Kimi k1.5, arXiv 2501.12599, section 2.3.2)."""
    penalty = log_ratio(tokens.logp, tokens.old_logp).square()
    return plain_loss(-tokens.advantage * tokens.logp + tau / 2 * penalty)


def dqo(tokens: LossInput, *, beta: Positive = 0.03) -> TokenLoss:
    """(beta log(pi / mu) - A)^2, for the advantages `dqo`: Q = V + beta log(pi / pi_ref) (DQO, arXiv 2410.09302).

    The error of Q is beta log(pi / pi_ref) - (r + later rewards and values - V). With the shaping ``kl`` of weight
    beta, A contains the token's own -beta log(mu / pi_ref), so that pi_ref cancels.
    """
    return plain_loss((beta * (tokens.logp - tokens.behaviour_logp) - tokens.advantage).square())


@needs(Input.REFERENCE)
@ignores_advantage
def sppo(tokens: LossInput, *, eta: Positive = 1.0) -> TokenLoss:
    """(log pi / pi_ref - eta (R - 1/2))^2 of whole sequences, R the share of opponents beaten (SPPO, arXiv 2405.00675).

    Every token has its sequence's value.
    """
    difference = tokens.logp - require(tokens.reference_logp, Input.REFERENCE)
    total = segment_sum(difference, tokens.sequence, tokens.sequences)[tokens.sequence]
    return plain_loss((total - eta * (tokens.episode_return - 0.5)).square())


MIN_REST = 1e-6
"""Minimum total probability of all tokens that are not among the most probable ones; rounding could make it 0."""


def successes(tokens: LossInput, *, above: float | None = None) -> torch.Tensor:
    """Choose the tokens of episodes with a return greater than `above`, or all: bool [tokens]."""
    if above is None:
        return torch.ones_like(tokens.logp, dtype=torch.bool)
    return exceeds(tokens.episode_return, above)


@chooses(successes, drops=True)
@ignores_advantage
def sft(tokens: LossInput, *, above: float | None = None) -> TokenLoss:
    """-log pi, the cross-entropy of demonstrated tokens.

    With ``above``, only episodes with a greater return train: rejection-sampling fine-tuning (RFT, arXiv 2308.01825).
    Other tokens do not count in denominators.
    """
    kept = successes(tokens, above=above) if tokens.chosen is None else tokens.chosen
    return TokenLoss(values=torch.where(kept, -tokens.logp, 0.0), clipped=~kept)


@needs(Input.TEACHER)
@ignores_advantage
def distill(tokens: LossInput) -> TokenLoss:
    """KL(pi, teacher) at the student's own tokens: the value of k1, the gradient of k2 (GKD, arXiv 2306.13649)."""
    return plain_loss(kl_divergence(KLEstimator.K1_PLUS, tokens.logp, require(tokens.teacher_logp, Input.TEACHER)))


@needs(Input.TEACHER_TOP)
@ignores_advantage
def distill_top_k(tokens: LossInput) -> TokenLoss:
    """KL(teacher, pi) over the teacher's k most probable tokens and all others as one (GKD, arXiv 2306.13649).

    The loss is sum_v p(v) (log p(v) - log pi(v)), where v is one of these tokens or the rest of the vocabulary as one
    event. It is 0 only if teacher and policy agree on all these probabilities. If k is the vocabulary size, it is the
    forward KL.
    """
    teacher = with_rest(require(tokens.teacher_top_logp, Input.TEACHER_TOP))
    own = with_rest(require(tokens.top_logp, Input.TEACHER_TOP))
    return plain_loss((teacher.exp() * (teacher - own)).sum(-1))


def with_rest(logp: torch.Tensor) -> torch.Tensor:
    """Append the log-probability of all remaining tokens: [tokens, k + 1] from [tokens, k]."""
    known = logp.exp().sum(-1, keepdim=True).clamp(max=1 - MIN_REST)
    return torch.cat([logp, torch.log1p(-known)], dim=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePairs:
    """Pairs of log-probabilities of trajectories, summed over their sampled tokens; all [pairs]."""

    chosen_logp: torch.Tensor
    """log pi of the better trajectory, with gradient."""
    rejected_logp: torch.Tensor
    """log pi of the worse trajectory, with gradient."""
    chosen_reference_logp: torch.Tensor
    rejected_reference_logp: torch.Tensor


@takes("pairs of trajectories (PreferencePairs)")
def dpo(pairs: PreferencePairs, *, beta: Positive = 0.1) -> torch.Tensor:
    """-log sigmoid(beta (x_better - x_worse)), x = log(pi / pi_ref): [pairs] (DPO, arXiv 2305.18290)."""
    better = pairs.chosen_logp - pairs.chosen_reference_logp
    worse = pairs.rejected_logp - pairs.rejected_reference_logp
    return -functional.logsigmoid(beta * (better - worse))


@takes("pairs of a demonstration and the previous policy's own trajectory (PreferencePairs)")
def spin(pairs: PreferencePairs, *, beta: Positive = 0.1) -> torch.Tensor:
    """`dpo` of demonstrations against samples of the previous policy, the reference: [pairs] (arXiv 2401.01335)."""
    return dpo(pairs, beta=beta)


def implicit_reward(rm_logp: torch.Tensor, reference_logp: torch.Tensor, *, beta: Positive = 0.05) -> torch.Tensor:
    """Compute p_t = beta log(pi_rm / pi_ref): [tokens] from log-probabilities [tokens]."""
    return beta * (rm_logp - reference_logp)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswers:
    """Input of a process reward model's loss: log-probabilities of tokens, and outcomes of episodes."""

    rm_logp: torch.Tensor
    """log pi_rm, with gradient: [tokens]."""
    reference_logp: torch.Tensor
    """log pi_ref: [tokens]."""
    episode: torch.Tensor
    """Episode of each token: int64 [tokens]."""
    success: torch.Tensor
    """Outcome of each episode, in [0, 1]: [episodes]."""


@takes("the answers that a reward model has scored (ScoredAnswers)")
def prime_reward_model(answers: ScoredAnswers, *, beta: Positive = 0.05) -> torch.Tensor:
    """Binary cross-entropy of the outcome with logit sum_t p_t: [episodes] (PRIME, arXiv 2502.01456, equation 4)."""
    reward = implicit_reward(answers.rm_logp, answers.reference_logp, beta=beta)
    logit = segment_sum(reward, answers.episode, answers.success.numel())
    return functional.binary_cross_entropy_with_logits(logit, answers.success.to(logit.dtype), reduction="none")
