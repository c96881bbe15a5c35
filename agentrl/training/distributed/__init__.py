"""Ranks: processes that hold a model in shards and train it together.

Rank 0 is the process of the run. It says what is to be done; all ranks, itself included, then run the same code on the
same arguments, and meet in collectives:

    rank 0    step(trajectories) ──► broadcast ──► own micro-batches ──► gradients added ──► update of own shards
    rank 1                           receive ───► own micro-batches ──► gradients added ──► update of own shards
"""

from agentrl.training.distributed.group import Ranks, join

__all__ = ["Ranks", "join"]
