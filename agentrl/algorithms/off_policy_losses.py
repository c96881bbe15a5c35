"""Losses for tokens that are far from the policy: old ones, an expert's, and regressions instead of surrogates."""

from __future__ import annotations

import torch

from agentrl.algorithms.given import given
from agentrl.algorithms.loss_input import LossInput, TokenLoss, log_ratio, unclipped
from agentrl.algorithms.marks import Input, advantage_weighted, averages_sequences, ignores_advantage, needs
from agentrl.algorithms.policy_losses import ppo
from agentrl.algorithms.ranges import Positive
from agentrl.algorithms.segments import segment_sum


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

    Args:
        tokens: With their expert marks.
        clip: As for `ppo`, also the next three.
        clip_low: lo.
        clip_high: hi.
        dual_clip: c.
        shaping: What is added to x.
    """
    expert = given(tokens.expert, Input.EXPERT)
    own = ppo(tokens, clip=clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    probability = tokens.logp.exp()
    guided = -tokens.advantage * probability / (probability + shaping)
    return TokenLoss(values=torch.where(expert, guided, own.values), clipped=own.clipped & ~expert)


@needs(Input.REFERENCE)
@averages_sequences
@ignores_advantage
def sppo(tokens: LossInput, *, eta: Positive = 1.0) -> TokenLoss:
    """(log pi / pi_ref - eta (R - 1/2))^2 of whole sequences, R the share of opponents beaten (SPPO, arXiv 2405.00675).

    Every token carries its sequence's value.
    """
    difference = tokens.logp - given(tokens.reference_logp, Input.REFERENCE)
    total = segment_sum(difference, tokens.sequence, tokens.sequences)[tokens.sequence]
    return unclipped((total - eta * (tokens.episode_return - 0.5)).square())
