"""How far the engine's log-probabilities are from the trainer's, over the sampled tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algorithms.loss_input import log_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Distances between pi_old (trainer) and mu (engine)."""

    prob_abs_mean: float
    """Mean |pi_old - mu|."""
    prob_abs_max: float
    k3: float
    """KL(mu, pi_old), estimated by mean(rho - log rho - 1)."""
    effective_sample_size: float
    """(sum rho)^2 / (n sum rho^2): 1 when trainer and engine agree."""


def mismatch(old_logp: torch.Tensor, behaviour_logp: torch.Tensor) -> Mismatch:
    """Compare log-probabilities of the same tokens: [tokens] each, at least one."""
    old, behaviour = old_logp.double(), behaviour_logp.double()
    difference = (old.exp() - behaviour.exp()).abs()
    log_rho = log_ratio(old, behaviour)
    rho = log_rho.exp()
    return Mismatch(
        prob_abs_mean=float(difference.mean()),
        prob_abs_max=float(difference.max()),
        k3=float((rho - log_rho - 1).mean()),
        effective_sample_size=float(rho.sum().square() / (rho.numel() * rho.square().sum())),
    )
