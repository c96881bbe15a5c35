"""The proximal policy without a forward pass of its own."""

from __future__ import annotations

import torch


def loglinear(
    logp: torch.Tensor, behaviour_logp: torch.Tensor, version: torch.Tensor, *, old_version: int
) -> torch.Tensor:
    """Log pi_old = log mu + a (log pi - log mu), a = (v_old - v_mu) / (v_pi - v_mu): [tokens], without gradient.

    Weights are taken to have moved evenly from the version that sampled a token, v_mu, to the one in training,
    v_pi = v_old + 1; v_old is that at the start of the step (AReaL).

    Args:
        logp: log pi, [tokens].
        behaviour_logp: log mu, [tokens].
        version: v_mu of each token: [tokens].
        old_version: v_old.
    """
    age = (old_version - version).to(logp.dtype)
    return (behaviour_logp + age / (age + 1) * (logp - behaviour_logp)).detach()
