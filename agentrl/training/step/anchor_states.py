"""Which turns of a group were taken in the same state."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch

from agentrl.trajectory import Source, TokenSequence, Trajectory


def turn_states(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Number the states in which the turns of trajectories were taken: int64 [turns], by trajectory, then by time.

    A state is the environment's key of it; where the environment gives none, the tokens of the observation that the
    turn answers, and its images. States of different groups are different.
    """
    numbers: dict[Hashable, int] = {}
    return torch.tensor(
        [
            numbers.setdefault((trajectory.group_id, state), len(numbers))
            for trajectory in trajectories
            for state in _states(trajectory)
        ],
        dtype=torch.int64,
    )


def _states(trajectory: Trajectory) -> Iterator[Hashable]:
    observed = dict(entry for sequence in trajectory.sequences for entry in _observed(sequence))
    for turn in trajectory.turns:
        yield observed[turn.index] if turn.state_key is None else turn.state_key


def _observed(sequence: TokenSequence) -> Iterator[tuple[int, Hashable]]:
    """Number of each turn that needs it, and what the agent was told since the turn before."""
    if all(turn.state_key is not None for turn in sequence.turns):
        return
    ids, told, before = sequence.token_ids, np.isin(sequence.sources, (Source.PROMPT, Source.OBSERVATION)), 0
    for turn in sequence.turns:
        if turn.state_key is None:
            seen = tuple(image.image.checksum for image in sequence.images if before <= image.start < turn.start)
            yield turn.index, (ids[before : turn.start][told[before : turn.start]].tobytes(), seen)
        before = turn.end
