"""Where the watch over a training's numbers speaks up."""

from __future__ import annotations

from pydantic import Field

from agentrl.config.section import Section


class NumericsConfig(Section):
    """Limits of the alarms, and what happens to updates that are not finite."""

    mismatch: float = Field(0.01, gt=0)
    """Mean |pi_old - mu| above which trainer and engine are not the same model."""
    kl: float = Field(0.5, gt=0)
    """KL of the policy to pi_old, within a step, above which it runs away."""
    kl_reference: float = Field(10.0, gt=0)
    """KL to the reference above which nothing is left of it."""
    entropy_share: float = Field(0.05, ge=0, lt=1)
    """Entropy below this share of that of the first steps has collapsed; 0 never."""
    grad_norm_ratio: float = Field(20.0, gt=1)
    """A gradient whose norm is so many times the median of the last steps is a spike."""
    most_skipped: int = Field(10, ge=1)
    """Updates left out in a row that end the run."""
    dumps: int = Field(2, ge=0)
    """Most files of a run that repeat an update that was left out; each holds the model's weights."""
