"""What a training step is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.training.step.guides import Guides
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """The episodes of a step, and how they were sampled."""

    trajectories: Sequence[Trajectory]
    """Whole groups, finished; failed and unscored ones may be among them."""
    temperature: float
    pad_id: int
    """Any id of the vocabulary."""
    guides: Guides = field(default_factory=Guides)
    """What was played beside the groups."""
