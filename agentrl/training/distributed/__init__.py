"""Ranks: processes that share a model in shards and train it together.

Rank 0 is the process of the run. It broadcasts calls; all ranks, including rank 0, then run the same code on the same
arguments, and communicate by collectives:

    rank 0    step(trajectories) ──► broadcast ──► own micro-batches ──► gradients added ──► update of own shards
    rank 1                           receive ───► own micro-batches ──► gradients added ──► update of own shards
"""

from agentrl.training.distributed.group import Ranks, join

__all__ = ["Ranks", "join"]
