"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algorithms.loss_input import TokenLoss
from agentrl.algorithms.marks import takes


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInput:
    """Tokens that a critic learns from; all tensors are [tokens]."""

    values: torch.Tensor
    """v of the current critic; the gradient flows through it."""
    old_values: torch.Tensor
    """V at the start of the step."""
    targets: torch.Tensor
    """G."""


@takes("a critic's values (ValueInput)")
def value(tokens: ValueInput, *, clip: float | None = 0.5) -> TokenLoss:
    """1/2 max((v - G)^2, (clip(v, V - eps, V + eps) - G)^2), eps = 0.5: [tokens] (arXiv 1707.06347's baselines).

    Args:
        tokens: The tokens.
        clip: eps; ``None`` leaves values unbounded.
    """
    plain = (tokens.values - tokens.targets).square()
    if clip is None:
        return TokenLoss(values=plain / 2, clipped=torch.zeros_like(plain, dtype=torch.bool))
    bounded = tokens.values.clamp(tokens.old_values - clip, tokens.old_values + clip)
    clipped = (bounded - tokens.targets).square()
    return TokenLoss(values=torch.maximum(plain, clipped) / 2, clipped=clipped > plain)
