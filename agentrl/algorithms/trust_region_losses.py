"""Losses that look at single tokens: which of them would move the policy too far, or collapse its entropy."""

from __future__ import annotations

import torch

from agentrl.algorithms.clip import clip_range
from agentrl.algorithms.loss_input import LossInput, TokenLoss, log_ratio, unclipped
from agentrl.algorithms.marks import advantage_weighted, chooses
from agentrl.algorithms.policy_losses import PPO_CLIP, clipped_surrogate
from agentrl.algorithms.ranges import NotNegative, Positive, Share

SMALLEST_PROBABILITY = 1e-7


def top_covariance(tokens: LossInput, *, share: Share = 2e-4) -> torch.Tensor:
    """The top share of tokens, at least one, by (A - mean A)(log pi - mean log pi): bool [tokens]."""
    covariance = token_covariance(tokens)
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[covariance.topk(_count(share, covariance)).indices] = True
    return chosen


@chooses(top_covariance, drops=False)
def kl_cov(tokens: LossInput, *, share: Share = 2e-4, coef: NotNegative = 1.0) -> TokenLoss:
    """-A r, plus coef abs(d) at the top share of tokens by covariance (KL-Cov, arXiv 2505.22617, section 4.2).

    Args:
        tokens: The tokens.
        share: k, of the tokens of an update.
        coef: Weight of abs(log pi - log pi_old).
    """
    chosen = top_covariance(tokens, share=share) if tokens.chosen is None else tokens.chosen
    difference = log_ratio(tokens.logp, tokens.old_logp)
    return unclipped(-tokens.advantage * difference.exp() + torch.where(chosen, coef * difference.abs(), 0.0))


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
    """A random share of the tokens, at least one if any, with a covariance in [cov_low, cov_high]: bool [tokens].

    Tokens that `ppo` clips anyway are not drawn. The others are drawn in the order of covariance, so that the order of
    the tokens does not matter, and anew in every update.
    """
    covariance = token_covariance(tokens)
    bounds = clip_range(clip, clip_low, clip_high, default=PPO_CLIP)
    clipped = clipped_surrogate(tokens.ratio, tokens.advantage, bounds, dual_clip=dual_clip).clipped
    inside = ((covariance >= cov_low) & (covariance <= cov_high) & ~clipped).nonzero().squeeze(-1)
    inside = inside[covariance[inside].argsort(stable=True)]
    generator = torch.Generator().manual_seed((tokens.draw + seed) % 2**63)
    order = torch.randperm(inside.numel(), generator=generator).to(inside.device)
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[inside[order[: _count(share, covariance)]]] = True
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

    As in the authors' code, the share is drawn from tokens that the clip of `ppo` leaves alone.

    Args:
        tokens: The tokens.
        clip: As for `ppo`, also the next three.
        clip_low: lo.
        clip_high: hi.
        dual_clip: c.
        share: Of all tokens of an update.
        cov_low: Where the band of (A - mean A)(log pi - mean log pi) begins.
        cov_high: Where it ends.
        seed: Added to the seed of the choice, which follows from ``run.seed`` and the number of the update.
    """
    chosen = tokens.chosen
    if chosen is None:
        clips = {"clip": clip, "clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
        chosen = random_in_band(tokens, **clips, share=share, cov_low=cov_low, cov_high=cov_high, seed=seed)
    bounds = clip_range(clip, clip_low, clip_high, default=PPO_CLIP)
    loss = clipped_surrogate(tokens.ratio, tokens.advantage, bounds, dual_clip=dual_clip)
    return TokenLoss(values=torch.where(chosen, 0.0, loss.values), clipped=loss.clipped | chosen)


@advantage_weighted
def dppo(
    tokens: LossInput, *, delta_low: NotNegative = 0.15, delta_high: NotNegative = 0.15, cap: Positive = 20.0
) -> TokenLoss:
    """-A r, 0 where (A > 0 and pi - mu > delta_high) or (A < 0 and mu - pi > delta_low) (DPPO, arXiv 2602.04879).

    A rare token may then gain many times its probability, and a frequent one no more than delta. The thresholds are
    those of the authors' scripts in verl, 0.15 for this loss and 0.05 for `dppo_binary_kl`.

    Args:
        tokens: The tokens.
        delta_low: The greatest loss of probability that still trains.
        delta_high: The greatest gain.
        cap: The greatest weight r of a token's gradient: large, because truncation biases (section 5.4); 20 as in verl.
    """
    pi, mu = tokens.logp.detach().exp(), tokens.behaviour_logp.exp()
    return _kept_inside(tokens, pi - mu > delta_high, mu - pi > delta_low, cap)


@advantage_weighted
def dppo_binary_kl(
    tokens: LossInput, *, delta_low: NotNegative = 0.05, delta_high: NotNegative = 0.05, cap: Positive = 20.0
) -> TokenLoss:
    """`dppo` by KL(mu, pi) of "this token or another": dropped where it is above 0.05 in A's direction."""
    pi, mu = (
        logp.exp().clamp(SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
        for logp in (tokens.logp.detach(), tokens.behaviour_logp)
    )
    divergence = mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()
    return _kept_inside(tokens, (pi > mu) & (divergence > delta_high), (pi < mu) & (divergence > delta_low), cap)


def low_second_moment(tokens: LossInput, *, tau: Positive = 0.04) -> torch.Tensor:
    """The most tokens whose mean of (log pi_old - log mu)^2 is below tau, smallest first: bool [tokens]."""
    moment = log_ratio(tokens.old_logp, tokens.behaviour_logp).square()
    ordered, order = moment.sort(stable=True)
    counts = torch.arange(1, moment.numel() + 1, device=moment.device)
    kept = torch.zeros_like(moment, dtype=torch.bool)
    kept[order] = ordered.cumsum(0) / counts < tau
    return kept


@chooses(low_second_moment, drops=True)
@advantage_weighted
def m2po(tokens: LossInput, *, tau: Positive = 0.04) -> TokenLoss:
    """-A r, without the tokens of the largest (log pi_old - log mu)^2: the mean of the rest is below tau = 0.04.

    M2PO, arXiv 2510.01161. What is dropped is in no denominator. With correction ``token`` the ratio is pi / mu, as in
    the paper.
    """
    kept = low_second_moment(tokens, tau=tau) if tokens.chosen is None else tokens.chosen
    return TokenLoss(values=torch.where(kept, -tokens.advantage * tokens.ratio, 0.0), clipped=~kept)


def token_covariance(tokens: LossInput) -> torch.Tensor:
    """(A - mean A)(log pi - mean log pi), over the tokens given: [tokens]."""
    logp = tokens.logp.detach()
    return (tokens.advantage - tokens.advantage.mean()) * (logp - logp.mean())


def _kept_inside(tokens: LossInput, above: torch.Tensor, below: torch.Tensor, cap: float) -> TokenLoss:
    """-A min(r, cap), with the gradient -A min(r, cap), and 0 for dropped tokens."""
    dropped = ((tokens.advantage > 0) & above) | ((tokens.advantage < 0) & below)
    ratio = tokens.ratio.detach()
    weighted = ratio.clamp(max=cap) * (tokens.logp - tokens.logp.detach()).exp()
    return TokenLoss(values=torch.where(dropped, 0.0, -tokens.advantage * weighted), clipped=dropped | (ratio > cap))


def _count(share: float, values: torch.Tensor) -> int:
    return min(max(1, int(share * values.numel())), values.numel())
