"""Policy losses, per token: pure functions of a `LossInput`; their keyword-only parameters are the config's options."""

from __future__ import annotations

import torch

from agentrl.algorithms.clip import ClipRange, clip_range
from agentrl.algorithms.loss_input import LossInput, TokenLoss, log_ratio
from agentrl.algorithms.marks import advantage_weighted
from agentrl.algorithms.segments import segment_mean

PPO_CLIP = ClipRange(low=0.2, high=0.2)
DAPO_CLIP = ClipRange(low=0.2, high=0.28)
GSPO_CLIP = ClipRange(low=3e-4, high=4e-4)
CISPO_CLIP = ClipRange(low=1.0, high=0.28)


@advantage_weighted
def ppo(
    tokens: LossInput,
    *,
    clip: float | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = 3.0,
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - lo, 1 + hi)), and min(that, -A c) where A < 0 (arXiv 1707.06347, 1912.09729).

    Args:
        tokens: The tokens.
        clip: lo and hi in one number; 0.2 when neither this nor a side is given.
        clip_low: lo.
        clip_high: hi.
        dual_clip: c; ``None`` leaves negative advantages unbounded.
    """
    bounds = clip_range(clip, clip_low, clip_high, default=PPO_CLIP)
    ratio = log_ratio(tokens.logp, tokens.old_logp).exp()
    return clipped_surrogate(ratio, tokens.advantage, bounds, dual_clip=dual_clip)


@advantage_weighted
def dapo(
    tokens: LossInput,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = 3.0,
) -> TokenLoss:
    """`ppo` with lo = 0.2 and hi = 0.28 (arXiv 2503.14476); meant for aggregation token-mean."""
    bounds = clip_range(None, clip_low, clip_high, default=DAPO_CLIP)
    ratio = log_ratio(tokens.logp, tokens.old_logp).exp()
    return clipped_surrogate(ratio, tokens.advantage, bounds, dual_clip=dual_clip)


@advantage_weighted
def gspo(tokens: LossInput, *, clip_low: float | None = None, clip_high: float | None = None) -> TokenLoss:
    """The PPO clip on s = exp(mean_t d_t) of each sequence, lo = 3e-4, hi = 4e-4 (GSPO-token, arXiv 2507.18071).

    Each token's gradient goes through sg(s) pi / sg(pi), and each keeps its own advantage.
    """
    bounds = clip_range(None, clip_low, clip_high, default=GSPO_CLIP)
    mean = segment_mean(log_ratio(tokens.logp, tokens.old_logp), tokens.sequence, tokens.sequences).detach()
    ratio = (mean[tokens.sequence] + tokens.logp - tokens.logp.detach()).exp()
    return clipped_surrogate(ratio, tokens.advantage, bounds, dual_clip=None)


@advantage_weighted
def cispo(tokens: LossInput, *, clip_low: float | None = None, clip_high: float | None = None) -> TokenLoss:
    """-sg(clip(r, 1 - lo, 1 + hi)) A log pi, with lo = 1 (no lower bound) and hi = 0.28 (arXiv 2506.13585)."""
    bounds = clip_range(None, clip_low, clip_high, default=CISPO_CLIP)
    ratio = log_ratio(tokens.logp, tokens.old_logp).exp().detach()
    return TokenLoss(values=-bounds.clip(ratio) * tokens.advantage * tokens.logp, clipped=bounds.outside(ratio))


@advantage_weighted
def reinforce(tokens: LossInput) -> TokenLoss:
    """-A log pi."""
    return TokenLoss(values=-tokens.advantage * tokens.logp, clipped=torch.zeros_like(tokens.logp, dtype=torch.bool))


def clipped_surrogate(
    ratio: torch.Tensor, advantage: torch.Tensor, bounds: ClipRange, *, dual_clip: float | None
) -> TokenLoss:
    """max(-A r, -A clip(r)), bounded by -A c where A < 0: all [tokens]."""
    plain, bounded = -advantage * ratio, -advantage * bounds.clip(ratio)
    values, clipped = torch.maximum(plain, bounded), bounded > plain
    if dual_clip is not None:
        ceiling = -advantage * dual_clip
        capped = (advantage < 0) & (values > ceiling)
        values, clipped = torch.where(capped, ceiling, values), clipped | capped
    return TokenLoss(values=values, clipped=clipped)
