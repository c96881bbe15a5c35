"""The implicit process reward model of PRIME: a language model that learns from outcomes what each token is worth."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config.section import Section


class ProcessRewardConfig(Section):
    """For ``algorithm.advantage: prime``. What is not here (optimizer, warm-up, schedule, epochs, mini-batches) is
    taken from ``trainer``.
    """

    path: str | None = None
    """The model that it starts from, and whose frozen copy it is compared with; of the policy's tokens. The policy's
    weights at the start of the run when left out."""
    learning_rate: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    beta: float = Field(0.05, gt=0)
    """A token's reward is beta log(pi_rm / pi_ref)."""
    success_above: float = 0.5
    """Episodes with a greater reward, before shaping, are those that succeeded."""
    update: Literal["before", "after"] = "before"
    """``before``: it learns from the episodes of a step, and then says what their tokens are worth. ``after``: the
    other way round."""
