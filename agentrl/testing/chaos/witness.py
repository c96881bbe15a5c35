"""Reward shaping that leaves rewards unchanged and writes the returns of every update to the ledger."""

from __future__ import annotations

import torch.distributed

from agentrl.algorithms.rewards import EpisodeRewards
from agentrl.testing.chaos.world import Ledger


def record_trained(rewards: EpisodeRewards, *, ledger: str) -> EpisodeRewards:
    """Write the returns of the episodes of an update, on rank 0, and return the rewards unchanged."""
    returns = rewards.returns.tolist()
    if returns and (not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0):
        Ledger(ledger).append("trained", returns=returns)
    return rewards
