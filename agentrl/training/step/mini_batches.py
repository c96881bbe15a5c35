"""Cutting a step into mini-batches, one optimizer step each."""

from __future__ import annotations

import itertools

import torch

from agentrl.training.step.batch import StepBatch


def mini_batches(batch: StepBatch, count: int, generator: torch.Generator) -> list[list[int]]:
    """Indices of sequences in `count` parts of nearly equal numbers of groups, in random order.

    Groups stay whole, so that a mean over a group's tokens means what it says; with fewer groups than parts,
    trajectories stay whole. Fewer parts come back only if there are not enough trajectories either.
    """
    groups = [batch.trajectory_group[trajectory] for trajectory in batch.sequence_trajectory]
    units = groups if len(set(groups)) >= count else list(batch.sequence_trajectory)
    members: dict[int, list[int]] = {}
    for sequence, unit in enumerate(units):
        members.setdefault(unit, []).append(sequence)
    names = list(members)
    order = torch.randperm(len(names), generator=generator).tolist()
    parts = min(count, len(names))
    bounds = [len(names) * part // parts for part in range(parts + 1)]
    return [
        [sequence for i in order[low:high] for sequence in members[names[i]]]
        for low, high in itertools.pairwise(bounds)
    ]
