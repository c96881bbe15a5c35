"""Everything that is known of a training step before its first update, but for pi_old."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from agentrl.training.critic.step import CriticStep
from agentrl.training.step.batch import StepBatch
from agentrl.training.step.frozen_models import FrozenOpinions
from agentrl.training.step.input import StepInput
from agentrl.training.step.selection import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """Who trains, on which tokens, with which advantages, in which updates."""

    given: StepInput
    selection: Selection
    """The experts' episodes are in it."""
    batch: StepBatch
    """With all rewards, and a critic's values where there is one."""
    frozen: FrozenOpinions
    advantage: torch.Tensor
    """float32 [tokens], on the CPU."""
    parts: list[list[int]]
    """The sequences of every update."""
    reads: list[bool]
    """Whether each sequence goes through the policy."""
    critic: CriticStep | None
    policy_learns: bool
    """Not while a critic is trained alone."""
    metrics: Mapping[str, float]
    """Of what was renewed and trained on the way, under their final names."""

    @property
    def first(self) -> list[int]:
        """The sequences that the policy reads before it changes."""
        return self.parts[0] if self.policy_learns else list(range(len(self.batch.sequences)))
