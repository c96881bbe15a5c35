"""Numbers of the optimizer that seldom change."""

from __future__ import annotations

from pydantic import Field

from agentrl.config.section import Decay, Section


class AdamConfig(Section):
    """Of AdamW, and the weight decay of Muon."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the moments."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight decay, on matrices."""
