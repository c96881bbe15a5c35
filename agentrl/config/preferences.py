"""Settings of learning from pairs of episodes."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agentrl.config.section import LearningRate, Section


class PreferencesConfig(Section):
    """Pairs of stored episodes of one task (`agentrl dpo`); what is not here is taken from ``trainer``."""

    sources: list[str] = Field(default_factory=list)
    """Runs, their folders ``trajectories``, or files of those; ``--from`` on the command line."""
    loss: str = "dpo"
    """Registry name of a loss on pairs (``dpo``, ``spin``), or module:attr."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments: ``{beta: 0.1}``."""
    pairs: Literal["rewards", "demonstrations"] = "rewards"
    """Who is preferred to whom: the episode with the greater reward; or a demonstration to what the policy did, for
    ``spin``."""
    pairs_per_task: int = Field(1, ge=1)
    """Most pairs of a task: the best with the worst, the second best with the second worst, and so on."""
    epochs: int = Field(1, ge=1)
    """Passes over the pairs."""
    pairs_per_update: int = Field(16, ge=1)
    """Pairs of an optimizer step."""
    learning_rate: LearningRate = 1e-6
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Learning rate after the warm-up; cosine ends at a tenth of it."""

    @model_validator(mode="after")
    def _pairs_fit_the_loss(self) -> Self:
        if self.loss == "spin" and self.pairs != "demonstrations":
            raise ValueError(
                "preferences.loss spin prefers demonstrations to what the policy did: "
                "set preferences.pairs=demonstrations, or preferences.loss=dpo"
            )
        return self
