"""Estimators of the KL divergence of the policy from a reference."""

from __future__ import annotations

import enum

import torch

from agentrl.algorithms.traits import Input
from agentrl.algorithms.types import LossInput, log_ratio, require

MAX_K3 = 10.0
"""Upper bound on k3 at a token, as in verl; otherwise a single token with 20 nats would dominate a whole step."""


class KLEstimator(enum.StrEnum):
    """Estimator of the KL divergence (http://joschu.net/blog/kl-approx.html)."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K1_PLUS = "k1+"
    """The value of k1 with the gradient of k2."""
    K3_PLUS = "k3+"
    """The value of k3 with the gradient of k2."""
    K3_RATIO = "k3_ratio"
    """r k3, r = pi / pi_old with gradient: an unbiased divergence and gradient on tokens that pi_old sampled."""


def kl_divergence(estimator: KLEstimator, logp: torch.Tensor, reference_logp: torch.Tensor) -> torch.Tensor:
    """Estimate KL(pi, ref) at each token, from x = log ref - log pi, clamped to [-20, 20]: [tokens].

    k1 = -x, k2 = x^2 / 2, and k3 = exp(x) - x - 1, at most 10 and without gradient above. On tokens that the policy
    sampled, the gradient of k2 is an unbiased estimate of the gradient of the divergence. The gradient of k3 estimates
    that of KL(ref, pi) instead (arXiv 2510.01555, 2512.21852). ``k3_ratio`` needs the factor r (`policy_kl`). Where x
    is clamped, only ``k1+`` has a gradient.
    """
    x = log_ratio(reference_logp, logp)
    k1, k2, k3 = -x, x.square() / 2, (x.exp() - x - 1).clamp(max=MAX_K3)
    match estimator:
        case KLEstimator.K1:
            return k1
        case KLEstimator.K2:
            return k2
        case KLEstimator.K3 | KLEstimator.K3_RATIO:
            return k3
        case KLEstimator.K1_PLUS:
            # the gradient of k2 is kept beyond the clamp, so that very unlikely tokens are still penalized
            return k1.detach() + k1.detach() * (logp - logp.detach())
        case KLEstimator.K3_PLUS:
            return k3.detach() + k2 - k2.detach()


def policy_kl(estimator: KLEstimator, tokens: LossInput) -> torch.Tensor:
    """Estimate KL(pi, ref) at each token, with ``k3_ratio`` weighted by r: [tokens] (DeepSeek-V3.2, arXiv 2512.02556).

    TRL calls it ``use_bias_correction_kl``.
    """
    kl = kl_divergence(estimator, tokens.logp, require(tokens.reference_logp, Input.REFERENCE))
    return kl * tokens.ratio if estimator is KLEstimator.K3_RATIO else kl
