"""Policy losses, per token: pure functions of a `LossInput`; their keyword-only parameters are the config's options."""

from __future__ import annotations

import math

import torch

from agentrl.algorithms.options import ClipRange, NotNegative, Positive, Share, clip_range
from agentrl.algorithms.segments import TIE, exceeds, segment_mean, segment_sum, tied_blocks, top_shares
from agentrl.algorithms.traits import Input, advantage_weighted, chooses, needs, weighs_behaviour
from agentrl.algorithms.types import (
    LOG_RATIO_LIMIT,
    MEAN_LOG_RATIO_LIMIT,
    LossInput,
    TokenLoss,
    log_ratio,
    plain_loss,
    require,
)

PPO_CLIP = ClipRange(low=0.2, high=0.2)
DAPO_CLIP = ClipRange(low=0.2, high=0.28)
GSPO_CLIP = ClipRange(low=3e-4, high=4e-4)
CISPO_CLIP = ClipRange(low=1.0, high=4.0)
GMPO_CLIP = ClipRange(low=0.4, high=0.4)


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

    ``clip`` sets lo and hi to the same value, ``clip_low`` and ``clip_high`` set one each; both are 0.2 by default.
    ``dual_clip`` is c; ``None`` disables the bound for negative advantages.
    """
    bounds = clip_range(clip, clip_low, clip_high, default=PPO_CLIP)
    return clipped_surrogate(tokens.ratio, tokens.advantage, bounds, dual_clip=dual_clip)


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
    return clipped_surrogate(tokens.ratio, tokens.advantage, bounds, dual_clip=dual_clip)


@advantage_weighted
def gspo(tokens: LossInput, *, clip_low: float | None = None, clip_high: float | None = None) -> TokenLoss:
    """The PPO clip on s = exp(mean_t d_t) of each sequence, lo = 3e-4, hi = 4e-4 (GSPO-token, arXiv 2507.18071).

    Each token's gradient flows through sg(s) pi / sg(pi), and each token keeps its own advantage. If the mean of d
    exceeds 10, s is exp(10) without gradient, as in verl: nothing else bounds it where A < 0.
    """
    bounds = clip_range(None, clip_low, clip_high, default=GSPO_CLIP)
    loss = clipped_surrogate(_sequence_ratio(tokens, tokens.logp - tokens.old_logp), tokens.advantage, bounds)
    return TokenLoss(values=loss.values, clipped=loss.clipped | _is_capped(tokens, tokens.logp - tokens.old_logp))


@advantage_weighted
def luspo(tokens: LossInput, *, clip_low: float | None = None, clip_high: float | None = None) -> TokenLoss:
    """`gspo`, for aggregation seq-mean-token-sum: long sequences weigh as much per token as short ones.

    LUSPO, arXiv 2602.05261; TRL multiplies the loss of each sequence by its length.
    """
    return gspo(tokens, clip_low=clip_low, clip_high=clip_high)


@advantage_weighted
def ppo_turn(
    tokens: LossInput,
    *,
    clip: float | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = 3.0,
) -> TokenLoss:
    """`ppo` on s = exp(mean_t d_t) of each turn instead of each token (ratio_type segment of ROLL).

    As in `gspo`, each token keeps its own advantage, and its gradient flows through sg(s) pi / sg(pi). A mean over a
    turn varies less than a token's ratio, and one turn does not clip another.
    """
    turn = torch.unique(require(tokens.turn, Input.TURN), return_inverse=True)[1]
    difference = tokens.logp - tokens.old_logp
    mean = segment_mean(difference.detach(), turn, tokens.logp.numel())[turn]
    ratio = (mean + difference - difference.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    bounds = clip_range(clip, clip_low, clip_high, default=PPO_CLIP)
    return clipped_surrogate(ratio, tokens.advantage, bounds, dual_clip=dual_clip)


MIN_LOG_WEIGHT = math.log(1e-8)
"""Lower bound of log W in `vespo`, as in its authors' code."""


@weighs_behaviour
@advantage_weighted
def vespo(
    tokens: LossInput,
    *,
    k_positive: Positive = 2.0,
    lambda_positive: Positive = 3.0,
    k_negative: Positive = 3.0,
    lambda_negative: Positive = 2.0,
) -> TokenLoss:
    """-sg(W^k exp(lambda (1 - W))) A log pi, W = prod_t pi / mu of each sequence (VESPO, arXiv 2602.10693).

    k and lambda depend on the sign of A, where 0 counts as positive. The weight is 1 at W = 1 and falls to 0 for small
    and large W, so that nothing is clipped; the sequence is not normalized by its length.
    """
    distance = log_ratio(tokens.logp, tokens.old_logp) + log_ratio(tokens.old_logp, tokens.behaviour_logp)
    total = segment_sum(distance.detach(), tokens.sequence, tokens.sequences)[tokens.sequence]
    log_weight = total.clamp(MIN_LOG_WEIGHT, LOG_RATIO_LIMIT)
    positive = tokens.advantage >= 0
    k = torch.where(positive, k_positive, k_negative)
    strength = torch.where(positive, lambda_positive, lambda_negative)
    phi = (strength + k * log_weight - strength * log_weight.exp()).exp()
    return plain_loss(-phi.to(tokens.logp.dtype) * tokens.advantage * tokens.logp)


@advantage_weighted
def cispo(tokens: LossInput, *, clip_low: float | None = None, clip_high: float | None = None) -> TokenLoss:
    """-sg(clip(r, 1 - lo, 1 + hi)) A log pi, with lo = 1 (no lower bound) and hi = 4 (CISPO, arXiv 2506.13585).

    MiniMax-M1 tunes hi and does not publish it. The bound 1 + hi = 5 is from ScaleRL (arXiv 2510.13786); TRL's
    documentation recommends it, too. A bound near 1 would down-weight the rare tokens that this loss is meant to
    preserve.
    """
    bounds = clip_range(None, clip_low, clip_high, default=CISPO_CLIP)
    ratio = tokens.ratio.detach()
    return TokenLoss(values=-bounds.clip(ratio) * tokens.advantage * tokens.logp, clipped=bounds.outside(ratio))


@advantage_weighted
def reinforce(tokens: LossInput) -> TokenLoss:
    """-A log pi (Williams, 1992; also the loss of GPG, arXiv 2504.02546)."""
    return plain_loss(-tokens.advantage * tokens.logp)


@advantage_weighted
def sapo(tokens: LossInput, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: 1.0 for A > 0, 1.05 for A < 0 (SAPO, arXiv 2511.20347).

    At a ratio of 1, the gradient equals PPO's; away from 1, it decreases smoothly instead of being clipped.
    """
    tau = torch.full_like(tokens.logp, tau_negative).masked_fill(tokens.advantage > 0, tau_positive)
    return plain_loss(-tokens.advantage * (4 / tau) * (tau * (tokens.ratio - 1)).sigmoid())


@advantage_weighted
def gmpo(tokens: LossInput, *, clip_low: float | None = None, clip_high: float | None = None) -> TokenLoss:
    """-A s, s = exp(mean_t c_t), c_t = d_t clipped to at most hi where A > 0, at least -lo where A < 0; both 0.4.

    GMPO, arXiv 2507.20673. Each token keeps its own advantage, and its gradient flows through sg(s) exp(c - sg(c)). If
    all advantages of a sequence are equal, that is the gradient of -A s; different advantages are not averaged. The
    mean of c is at most 10, as in `gspo`.
    """
    bounds = clip_range(None, clip_low, clip_high, default=GMPO_CLIP)
    difference = tokens.logp - tokens.old_logp
    bounded = torch.where(tokens.advantage > 0, difference.clamp(max=bounds.high), difference.clamp(min=-bounds.low))
    ratio = _sequence_ratio(tokens, bounded)
    clipped = (bounded != difference) | _is_capped(tokens, bounded)
    return TokenLoss(values=-tokens.advantage * ratio, clipped=clipped)


@weighs_behaviour
@advantage_weighted
def decoupled_ppo(
    tokens: LossInput,
    *,
    clip: float | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = 3.0,
    cap: Positive = 5.0,
) -> TokenLoss:
    """min(rho, 5) times `ppo`, rho = pi_old / mu: always weighted (arXiv 2110.00641; AReaL, arXiv 2505.24298).

    ``cap`` is the maximum weight; the other options are those of `ppo`.
    """
    loss = ppo(tokens, clip=clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    rho = log_ratio(tokens.old_logp, tokens.behaviour_logp).exp().detach()
    return TokenLoss(values=rho.clamp(max=cap) * loss.values, clipped=loss.clipped | (rho > cap))


def vapo(
    tokens: LossInput,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = 3.0,
    positive_weight: NotNegative = 0.1,
) -> TokenLoss:
    """`dapo`, and 0.1 times -log pi at tokens of episodes with R > 0 (VAPO, arXiv 2504.05118, section 4.3).

    ``positive_weight`` is the weight of this language-modelling loss, aggregated over all tokens; the other options are
    those of `dapo`.
    """
    loss = dapo(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    imitation = torch.where(exceeds(tokens.episode_return, 0.0), -tokens.logp, 0.0)
    return TokenLoss(values=loss.values + positive_weight * imitation, clipped=loss.clipped)


def _mean_log_ratio(tokens: LossInput, log_ratios: torch.Tensor) -> torch.Tensor:
    """Compute the mean log-ratio of each token's sequence, without gradient: [tokens] from log-ratios [tokens]."""
    return segment_mean(log_ratios.detach(), tokens.sequence, tokens.sequences)[tokens.sequence]


def _sequence_ratio(tokens: LossInput, log_ratios: torch.Tensor) -> torch.Tensor:
    """Compute the geometric mean of the ratios of each token's sequence: [tokens].

    Each token's gradient is that of its own ratio. Single log-ratios are not bounded, because large ones with opposite
    signs cancel; their mean is.
    """
    mean = _mean_log_ratio(tokens, log_ratios)
    return (mean + log_ratios - log_ratios.detach()).clamp(max=MEAN_LOG_RATIO_LIMIT).exp()


def _is_capped(tokens: LossInput, log_ratios: torch.Tensor) -> torch.Tensor:
    return _mean_log_ratio(tokens, log_ratios) > MEAN_LOG_RATIO_LIMIT


def clipped_surrogate(
    ratio: torch.Tensor, advantage: torch.Tensor, bounds: ClipRange, *, dual_clip: float | None = None
) -> TokenLoss:
    """Compute max(-A r, -A clip(r)), bounded by -A c where A < 0: all [tokens]."""
    plain, bounded = -advantage * ratio, -advantage * bounds.clip(ratio)
    values, clipped = torch.maximum(plain, bounded), bounded > plain
    if dual_clip is not None:
        ceiling = -advantage * dual_clip
        capped = (advantage < 0) & (values > ceiling)
        values, clipped = torch.where(capped, ceiling, values), clipped | capped
    return TokenLoss(values=values, clipped=clipped)


MIN_PROBABILITY = 1e-7


def top_covariance(tokens: LossInput, *, share: Share = 2e-4) -> torch.Tensor:
    """Choose a share of tokens, at least one, with the largest (A - mean A)(log pi - mean log pi): 0 to 1, [tokens].

    Tokens that tie for the last places share them evenly.
    """
    covariance = token_covariance(tokens)
    return top_shares(covariance, _count(share, covariance))


@chooses(top_covariance, drops=False)
def kl_cov(tokens: LossInput, *, share: Share = 2e-4, coef: NotNegative = 1.0) -> TokenLoss:
    """-A r, plus coef abs(d) at the top share of tokens by covariance (KL-Cov, arXiv 2505.22617, section 4.2).

    ``share`` is the share of an update's tokens; d is log pi - log pi_old.
    """
    chosen = top_covariance(tokens, share=share) if tokens.chosen is None else tokens.chosen
    difference = log_ratio(tokens.logp, tokens.old_logp)
    return plain_loss(-tokens.advantage * difference.exp() + chosen * coef * difference.abs())


def random_in_band(
    tokens: LossInput,
    *,
    clip: float | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = 3.0,
    share: Share = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    seed: int = 0,
) -> torch.Tensor:
    """Draw a random share of tokens, at least one, with a covariance in [cov_low, cov_high]: 0 to 1, [tokens].

    Tokens that `ppo` clips are not drawn. Every update draws anew, over the tokens sorted by covariance. Tokens with
    equal covariance evenly share the places drawn among them, so that the order of tokens does not matter.
    """
    covariance = token_covariance(tokens)
    bounds = clip_range(clip, clip_low, clip_high, default=PPO_CLIP)
    clipped = clipped_surrogate(tokens.ratio, tokens.advantage, bounds, dual_clip=dual_clip).clipped
    inside = ((covariance >= cov_low) & (covariance <= cov_high) & ~clipped).nonzero().squeeze(-1)
    ordered, order = covariance[inside].sort(stable=True)
    generator = torch.Generator().manual_seed((tokens.draw + seed) % 2**63)
    drawn_at = torch.randperm(inside.numel(), generator=generator)[: _count(share, covariance)].to(inside.device)
    drawn = torch.zeros_like(ordered).index_fill(0, drawn_at, 1.0)
    block = tied_blocks(ordered)
    chosen = torch.zeros_like(covariance)
    chosen[inside[order]] = segment_mean(drawn, block, inside.numel())[block]
    return chosen


@chooses(random_in_band, drops=False)
@advantage_weighted
def clip_cov(
    tokens: LossInput,
    *,
    clip: float | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = 3.0,
    share: Share = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    seed: int = 0,
) -> TokenLoss:
    """`ppo`, with the loss of a random share of tokens in a covariance band set to 0 (Clip-Cov, arXiv 2505.22617).

    As in the authors' code, the tokens are drawn from those that `ppo` does not clip.

    ``share`` is the share of all tokens of an update; ``cov_low`` and ``cov_high`` bound (A - mean A)(log pi - mean log
    pi). ``seed`` is added to the seed of the draw, which depends on ``run.seed`` and the number of the update.
    """
    chosen = tokens.chosen
    if chosen is None:
        clips = {"clip": clip, "clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
        chosen = random_in_band(tokens, **clips, share=share, cov_low=cov_low, cov_high=cov_high, seed=seed)
    bounds = clip_range(clip, clip_low, clip_high, default=PPO_CLIP)
    loss = clipped_surrogate(tokens.ratio, tokens.advantage, bounds, dual_clip=dual_clip)
    return TokenLoss(values=loss.values * (1 - chosen.to(loss.values.dtype)), clipped=loss.clipped | (chosen > 0))


@advantage_weighted
def dppo(
    tokens: LossInput, *, delta_low: NotNegative = 0.15, delta_high: NotNegative = 0.15, cap: Positive = 20.0
) -> TokenLoss:
    """-A r, 0 where (A > 0 and pi - mu > delta_high) or (A < 0 and mu - pi > delta_low) (DPPO, arXiv 2602.04879).

    The probability of a rare token may thus increase many times, that of a frequent token by at most delta. The
    thresholds are those of the authors' scripts in verl, 0.15 for this loss and 0.05 for `dppo_binary_kl`.

    ``delta_low`` and ``delta_high`` are the maximum loss and gain of probability of a trained token. ``cap`` is
    the maximum weight r of a token's gradient: 20 as in verl, large because truncation adds bias (section 5.4).
    """
    pi, mu = tokens.logp.detach().exp(), tokens.behaviour_logp.exp()
    return _drop_outside(tokens, pi - mu > delta_high, mu - pi > delta_low, cap)


@advantage_weighted
def dppo_binary_kl(
    tokens: LossInput, *, delta_low: NotNegative = 0.05, delta_high: NotNegative = 0.05, cap: Positive = 20.0
) -> TokenLoss:
    """`dppo` with the binary KL(mu, pi) of "this token or another": 0 where it exceeds 0.05 in A's direction."""
    pi, mu = (
        logp.exp().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY) for logp in (tokens.logp.detach(), tokens.behaviour_logp)
    )
    divergence = mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()
    return _drop_outside(tokens, (pi > mu) & (divergence > delta_high), (pi < mu) & (divergence > delta_low), cap)


def low_second_moment(tokens: LossInput, *, tau: Positive = 0.04) -> torch.Tensor:
    """Choose as many tokens as possible, smallest first, with a mean (log pi_old - log mu)^2 below tau: bool [tokens].

    Tokens that tie with the first dropped one are dropped, too, so that the order of tokens does not matter.
    """
    distance = log_ratio(tokens.old_logp, tokens.behaviour_logp).abs().double()
    ordered = distance.sort().values
    counts = torch.arange(1, distance.numel() + 1, device=distance.device)
    dropped = ordered[ordered.square().cumsum(0) / counts >= tau]
    if not dropped.numel():
        return torch.ones_like(distance, dtype=torch.bool)
    tie = TIE * max(1.0, float(tokens.old_logp.abs().max()))
    return distance < dropped[0] - tie


@chooses(low_second_moment, drops=True)
@advantage_weighted
def m2po(tokens: LossInput, *, tau: Positive = 0.04) -> TokenLoss:
    """-A r, without the tokens with the largest (log pi_old - log mu)^2: the mean of the rest is below tau = 0.04.

    M2PO, arXiv 2510.01161. Dropped tokens do not count in denominators. With the correction ``token``, the ratio is
    pi / mu, as in the paper.
    """
    kept = low_second_moment(tokens, tau=tau) if tokens.chosen is None else tokens.chosen
    return TokenLoss(values=torch.where(kept, -tokens.advantage * tokens.ratio, 0.0), clipped=~kept)


def token_covariance(tokens: LossInput) -> torch.Tensor:
    """Compute (A - mean A)(log pi - mean log pi) over the given tokens: [tokens]."""
    logp = tokens.logp.detach()
    return (tokens.advantage - tokens.advantage.mean()) * (logp - logp.mean())


def _drop_outside(tokens: LossInput, above: torch.Tensor, below: torch.Tensor, cap: float) -> TokenLoss:
    """Compute -A min(r, cap), which is also its derivative by log pi, and 0 for dropped tokens."""
    dropped = ((tokens.advantage > 0) & above) | ((tokens.advantage < 0) & below)
    ratio = tokens.ratio.detach()
    weighted = ratio.clamp(max=cap) * (tokens.logp - tokens.logp.detach()).exp()
    return TokenLoss(values=torch.where(dropped, 0.0, -tokens.advantage * weighted), clipped=dropped | (ratio > cap))


def _count(share: float, values: torch.Tensor) -> int:
    return min(max(1, int(share * values.numel())), values.numel())


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

    LUFFY, arXiv 2504.14945, section 3.3. In the paper, one of eight members of a group is an expert's episode.
    ``shaping`` is the term added to x in the denominator; the other options are those of `ppo`.
    """
    expert = require(tokens.expert, Input.EXPERT)
    own = ppo(tokens, clip=clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    probability = tokens.logp.exp()
    guided = -tokens.advantage * probability / (probability + shaping)
    return TokenLoss(values=torch.where(expert, guided, own.values), clipped=own.clipped & ~expert)


@needs(Input.EXPERT)
@advantage_weighted
def rl_plus(
    tokens: LossInput,
    *,
    clip: float | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = 3.0,
    exploration: NotNegative = 0.5,
) -> TokenLoss:
    """-A (1 - sg(pi))^0.5 2 pi / (pi_old + (pi_old + 1) / 2) at an expert's tokens, unclipped; `ppo` at the policy's.

    RL-PLUS, arXiv 2508.00222. The denominator estimates the expert's probability by the mean of pi_old and 1.
    ``exploration`` is the exponent that up-weights tokens that the policy finds improbable; the other options are those
    of `ppo`. The authors' script does not clip the policy's own tokens: ``clip: 1e9`` and ``dual_clip: null``.
    """
    expert = require(tokens.expert, Input.EXPERT)
    own = ppo(tokens, clip=clip, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    probability, before = tokens.logp.exp(), tokens.old_logp.exp()
    ratio = 2 * probability / (before + (before + 1) / 2)
    guided = -tokens.advantage * (1 - probability.detach()).clamp(min=0.0) ** exploration * ratio
    return TokenLoss(values=torch.where(expert, guided, own.values), clipped=own.clipped & ~expert)
