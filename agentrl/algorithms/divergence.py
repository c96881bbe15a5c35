"""Estimators of the KL divergence of the policy from a reference, one value per sampled token."""

from __future__ import annotations

import enum

import torch

from agentrl.algorithms.loss_input import log_ratio

LARGEST_K3 = 10.0
"""Upper bound of the value of k3 at a token, as in verl; without it one token of 20 nats outweighs a whole step."""


class KLEstimator(enum.StrEnum):
    """Which estimator (http://joschu.net/blog/kl-approx.html)."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K1_PLUS = "k1+"
    """The value of k1 with the gradient of k2."""
    K3_PLUS = "k3+"
    """The value of k3 with the gradient of k2."""


def kl_divergence(estimator: KLEstimator, logp: torch.Tensor, reference_logp: torch.Tensor) -> torch.Tensor:
    """KL(pi, ref) at each token, from x = log ref - log pi, clamped to [-20, 20]: [tokens].

    k1 = -x, k2 = x^2 / 2, k3 = exp(x) - x - 1, at most 10; above that k3 has no gradient. On tokens that the policy
    sampled, the gradient of k2 is an unbiased estimate of the divergence's. That of k3 is an estimate of the gradient
    of KL(ref, pi) instead (arXiv 2510.01555, 2512.21852).
    """
    x = log_ratio(reference_logp, logp)
    k1, k2, k3 = -x, x.square() / 2, (x.exp() - x - 1).clamp(max=LARGEST_K3)
    match estimator:
        case KLEstimator.K1:
            return k1
        case KLEstimator.K2:
            return k2
        case KLEstimator.K3:
            return k3
        case KLEstimator.K1_PLUS:
            return k1.detach() + k2 - k2.detach()
        case KLEstimator.K3_PLUS:
            return k3.detach() + k2 - k2.detach()
