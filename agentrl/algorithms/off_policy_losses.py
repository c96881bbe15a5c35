"""Losses for tokens that are far from the policy: old ones, an expert's, and regressions instead of surrogates.

Some learn from demonstrated tokens, a teacher, pairs of trajectories, or outcomes (implicit process rewards, PRIME).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from agentrl.algorithms.advantages import against_others, rloo, token_returns
from agentrl.algorithms.correction import KLEstimator, kl_divergence
from agentrl.algorithms.options import Discount, Positive
from agentrl.algorithms.policy_losses import ppo
from agentrl.algorithms.segments import segment_mean, segment_sum
from agentrl.algorithms.traits import (
    Input,
    advantage_weighted,
    chooses,
    compares_group,
    ignores_advantage,
    needs,
    takes,
)
from agentrl.algorithms.types import EpisodeBatch, LossInput, TokenLoss, given, log_ratio, unclipped


@advantage_weighted
def topr(tokens: LossInput) -> TokenLoss:
    """-A log pi where R > 0, else -sg(clip(r, 0, 1)) A log pi (TOPR, arXiv 2503.14286)."""
    ratio = tokens.ratio.detach()
    good = tokens.episode_return > 0
    weight = torch.where(good, 1.0, ratio.clamp(0.0, 1.0))
    return TokenLoss(values=-weight * tokens.advantage * tokens.logp, clipped=~good & (ratio > 1.0))


def kimi(tokens: LossInput, *, tau: Positive = 0.1) -> TokenLoss:
    """-A log pi + (tau / 2)(log pi - log pi_old)^2, tau = 0.1 (Kimi k1.5, arXiv 2501.12599, section 2.3.2)."""
    penalty = log_ratio(tokens.logp, tokens.old_logp).square()
    return unclipped(-tokens.advantage * tokens.logp + tau / 2 * penalty)


@needs(Input.EXPERT)
@advantage_weighted
def luffy(
    tokens: LossInput,
    *,
    clip: float | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = 3.0,
    shaping: Positive = 0.1,
) -> TokenLoss:
    """-A f(pi), f(x) = x / (x + 0.1), at an expert's tokens, without a clip; `ppo` at the policy's own.

    LUFFY, arXiv 2504.14945, section 3.3. The expert's episodes are members of the group: one in eight.
    ``shaping`` is the number that is added to x; the other options are those of `ppo`.
    """
    expert = given(tokens.expert, Input.EXPERT)
    own = ppo(tokens, clip=clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    probability = tokens.logp.exp()
    guided = -tokens.advantage * probability / (probability + shaping)
    return TokenLoss(values=torch.where(expert, guided, own.values), clipped=own.clipped & ~expert)


@needs(Input.REFERENCE)
@ignores_advantage
def sppo(tokens: LossInput, *, eta: Positive = 1.0) -> TokenLoss:
    """(log pi / pi_ref - eta (R - 1/2))^2 of whole sequences, R the share of opponents beaten (SPPO, arXiv 2405.00675).

    Every token carries its sequence's value.
    """
    difference = tokens.logp - given(tokens.reference_logp, Input.REFERENCE)
    total = segment_sum(difference, tokens.sequence, tokens.sequences)[tokens.sequence]
    return unclipped((total - eta * (tokens.episode_return - 0.5)).square())


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

    With ``above``, only episodes with a greater return train: rejection-sampling fine-tuning (RFT, arXiv 2308.01825).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePairs:
    """Log-probabilities of trajectories, summed over their sampled tokens, in pairs; all [pairs]."""

    chosen_logp: torch.Tensor
    """log pi of the better one; the gradient flows through it."""
    rejected_logp: torch.Tensor
    """log pi of the worse one; the gradient flows through it."""
    chosen_reference_logp: torch.Tensor
    rejected_reference_logp: torch.Tensor


@takes("pairs of trajectories (PreferencePairs)")
def dpo(pairs: PreferencePairs, *, beta: Positive = 0.1) -> torch.Tensor:
    """-log sigmoid(beta (log pi / pi_ref of the better - that of the worse)): [pairs] (DPO, arXiv 2305.18290)."""
    better = pairs.chosen_logp - pairs.chosen_reference_logp
    worse = pairs.rejected_logp - pairs.rejected_reference_logp
    return -functional.logsigmoid(beta * (better - worse))


@takes("pairs of a demonstration and the previous policy's own trajectory (PreferencePairs)")
def spin(pairs: PreferencePairs, *, beta: Positive = 0.1) -> torch.Tensor:
    """`dpo` of demonstrations against what the previous policy, the reference, did: [pairs] (arXiv 2401.01335)."""
    return dpo(pairs, beta=beta)


@needs(Input.PROCESS_REWARD)
@compares_group
def prime(episodes: EpisodeBatch, *, gamma: Discount = 1.0) -> torch.Tensor:
    """A = `rloo` of R + return-to-go of (p_t - the others' mean p): [tokens] (PRIME, arXiv 2502.01456, equation 5).

    p_t is the implicit process reward of a token; each other member counts by the mean over its tokens, whatever its
    length.
    """
    process = given(episodes.process_reward, Input.PROCESS_REWARD)
    own = segment_mean(process, episodes.token_episode, episodes.returns.numel())
    others = own - against_others(own, episodes)
    return rloo(episodes) + token_returns(episodes, process - episodes.to_tokens(others), gamma)


def implicit_reward(rm_logp: torch.Tensor, reference_logp: torch.Tensor, *, beta: Positive = 0.05) -> torch.Tensor:
    """p_t = beta log(pi_rm / pi_ref): [tokens] from log-probabilities [tokens]."""
    return beta * (rm_logp - reference_logp)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswers:
    """Input of a reward model's loss: its tokens' log-probabilities, and which episodes succeeded."""

    rm_logp: torch.Tensor
    """log pi_rm: [tokens]; the gradient flows through it."""
    reference_logp: torch.Tensor
    """log pi_ref: [tokens]."""
    episode: torch.Tensor
    """Episode of each token: int64 [tokens]."""
    success: torch.Tensor
    """Outcome of each episode, in [0, 1]: [episodes]."""


@takes("the answers that a reward model has scored (ScoredAnswers)")
def prime_reward_model(answers: ScoredAnswers, *, beta: Positive = 0.05) -> torch.Tensor:
    """-log sigmoid of the outcome's logit sum_t p_t: [episodes] (PRIME, arXiv 2502.01456, equation 4)."""
    reward = implicit_reward(answers.rm_logp, answers.reference_logp, beta=beta)
    logit = segment_sum(reward, answers.episode, answers.success.numel())
    return functional.binary_cross_entropy_with_logits(logit, answers.success.to(logit.dtype), reduction="none")
