"""The critic of PPO: a model that learns what an episode will still bring, token by token."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.config.section import LearningRate, Section


class CriticConfig(Section):
    """What is not here (optimizer, warm-up, schedule, epochs, mini-batches) is taken from ``trainer``."""

    kind: Literal["own", "shared"] = "own"
    """``own``: a model of its own, with an output of one number. ``shared``: such an output on the policy's hidden
    states, which takes next to no memory, and lets the value loss change the policy's weights, too."""
    path: str | None = None
    """The model that an ``own`` critic starts from, of the policy's vocabulary; the policy's weights when left out."""
    learning_rate: LearningRate = 1e-5
    """Peak learning rate; of the output only, where the rest is the policy's."""
    pretrain_steps: int = Field(0, ge=0)
    """Training steps, the first ones, in which only the critic learns; a ``shared`` one's output only."""
    clip: float | None = Field(0.5, gt=0)
    """How far a step moves a value before the value loss no longer rewards it; ``null`` bounds nothing."""
    coef: float = Field(0.5, gt=0, allow_inf_nan=False)
    """Weight of the value loss beside the policy's loss; only ``shared``."""

    @model_validator(mode="after")
    def _keys_are_used(self) -> Self:
        if self.kind == "shared" and self.path is not None:
            raise ValueError("trainer.critic.path is ignored with kind shared: remove it, or use kind own")
        if self.kind == "own" and self.coef != type(self).model_fields["coef"].default:
            raise ValueError("trainer.critic.coef is ignored with kind own: remove it, or use kind shared")
        return self
