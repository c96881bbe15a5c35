"""Settings of a reward model that scores finished episodes."""

from __future__ import annotations

from pydantic import Field

from agentrl.config.section import Finite, Section


class RewardModelConfig(Section):
    """A sequence classifier with one output reads an episode's transcript; its output is the reward."""

    path: str
    """A Hugging Face name or folder, or a run of `agentrl reward-model`."""
    max_tokens: int = Field(4096, ge=1)
    """Tokens of a transcript, in the reward model's own tokens; of a longer one the end is read."""
    environment_weight: Finite = 0.0
    """Weight of the environment's own reward, which is added."""
