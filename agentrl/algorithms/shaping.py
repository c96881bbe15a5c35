"""Penalties that are added to rewards before advantages are estimated."""

from __future__ import annotations

import torch


def invalid_penalty(valid: torch.Tensor, penalty: float) -> torch.Tensor:
    """`penalty` (zero or negative) for each turn that was not valid, else 0: bool [turns] to float64 [turns]."""
    return (~valid).double() * penalty


def overlong_penalty(length: torch.Tensor, *, longest: int, buffer: int, factor: float) -> torch.Tensor:
    """min(-(length - (longest - buffer)) / buffer * factor, 0): tokens [episodes] to float64 [episodes].

    DAPO (arXiv 2503.14476), equation 13.
    """
    excess = length.double() - (longest - buffer)
    return (-excess / buffer * factor).clamp(max=0.0)
