"""Which episodes train how often."""

from __future__ import annotations

import torch

from agentrl.algorithms.ranges import Positive


def pf_ppo(returns: torch.Tensor, seed: int, *, power: Positive = 2.0) -> torch.Tensor:
    """Episodes drawn with replacement, each with weight abs(R)^p, as many as there are: int64 [episodes] indices.

    PF-PPO, arXiv 2409.06957. Where all weights are 0 every episode is drawn once.
    """
    weight = returns.abs().double() ** power
    if not bool((weight > 0).any()):
        return torch.arange(returns.numel())
    return torch.multinomial(
        weight.cpu(), returns.numel(), replacement=True, generator=torch.Generator().manual_seed(seed)
    )
