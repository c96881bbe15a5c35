"""The share of each token in the loss of an update, where episodes may be drawn more than once."""

from __future__ import annotations

import torch

from agentrl.algorithms.aggregation import TokenOwners
from agentrl.training.objective import Objective


def token_shares(
    objective: Objective, owners: TokenOwners, index: torch.Tensor, draws: torch.Tensor | None
) -> torch.Tensor:
    """Weight of each token of a step, 0 for those that are not of this update: float32 [tokens].

    Args:
        objective: Knows the aggregation.
        owners: Of the tokens of the step.
        index: The tokens of the update that train: int64 [selected].
        draws: How often each trajectory was drawn: int64 [trajectories]; once when left out. One that was drawn twice
            counts as two.
    """
    shares = torch.zeros(owners.sequence.numel())
    if draws is None:
        shares[index] = objective.weights(owners.select(index)).float()
        return shares
    times = draws[owners.trajectory[index]]
    drawn = index.repeat_interleave(times)
    first = (times.cumsum(0) - times).repeat_interleave(times)
    copy = torch.arange(drawn.numel()) - first
    most, own = int(draws.max()), owners.select(drawn)
    copies = TokenOwners(sequence=own.sequence * most + copy, trajectory=own.trajectory * most + copy, group=own.group)
    return shares.index_add(0, drawn, objective.weights(copies).float())
