"""What a critic learns in one step: the values of its start, the returns, and the loss between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algorithms.value_loss import ValueInput, value
from agentrl.training.step.tally import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTargets:
    """Of a step's sampled tokens; float32 [tokens] each, on the device where the critic computes."""

    old_values: torch.Tensor
    """V at the start of the step."""
    targets: torch.Tensor
    """G; NaN at tokens that the critic learns nothing from."""
    clip: float | None

    def weights(self, index: torch.Tensor) -> torch.Tensor:
        """The mean over those tokens of an update that have a target, as a weight of each of the step's: [tokens].

        Args:
            index: The tokens of the update: int64 [selected].
        """
        known = index.to(self.targets.device)
        known = known[self.targets[known].isfinite()]
        return torch.zeros_like(self.targets).index_fill(0, known, 1 / max(known.numel(), 1))

    def loss(self, values: torch.Tensor, where: torch.Tensor, weights: torch.Tensor, tally: Tally) -> torch.Tensor:
        """Weighted sum of the loss of some tokens.

        Args:
            values: v of the current critic: [selected]; carries the gradient.
            where: Which tokens they are: int64 [selected].
            weights: As `weights` gives them: [tokens].
            tally: Takes in the loss and the clipped share.
        """
        learnt = weights[where] > 0
        where, values = where[learnt], values[learnt]
        tokens = ValueInput(values=values, old_values=self.old_values[where], targets=self.targets[where])
        loss = value(tokens, clip=self.clip)
        tally.add("critic/loss", loss.values)
        tally.add("critic/clip_share", loss.clipped)
        return (weights[where] * loss.values).sum()

    def measurements(self) -> dict[str, float]:
        """How good the values of the start of the step were.

        The explained variance is 1 - Var(G - V) / Var(G): 1 for a perfect critic, 0 for one that knows the mean only;
        left out where all returns are equal.
        """
        known = self.targets.isfinite()
        targets, values = self.targets[known].double(), self.old_values[known].double()
        found = {"critic/value_mean": float(values.mean()), "critic/target_mean": float(targets.mean())}
        spread = float(targets.var(correction=0))
        if spread > 0:
            found["critic/explained_variance"] = 1 - float((targets - values).var(correction=0)) / spread
        return found
