"""Training of mixtures of experts."""

from __future__ import annotations

from pydantic import Field

from agentrl.config.section import Section


class MixtureConfig(Section):
    """Of models with routed experts; see docs/experts.md."""

    balance: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight in the loss of the balance among the experts; costs a further forward pass."""
    replay: bool = False
    """Send tokens to the experts to which the engine sent them, so that rounding does not set trainer and engine
    apart."""
