"""Rewards of turns as estimators see them: the environment's, the scorer's, and penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentrl.algorithms.segments import segment_sum
from agentrl.algorithms.shaping import invalid_penalty, overlong_penalty
from agentrl.config.schema import AlgorithmConfig
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedRewards:
    """Rewards after shaping; an episode's turns add up to its return."""

    returns: torch.Tensor
    """float64 [episodes]."""
    turn_reward: torch.Tensor
    """float64 [turns], ordered by episode, then by time."""
    turn_episode: torch.Tensor
    """int64 [turns]."""


def shaped_rewards(trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig, *, max_tokens: int) -> ShapedRewards:
    """Turn rewards of trajectories that all have a reward.

    What the scorer gave beyond the sum of the environment's turn rewards belongs to the last turn, and so does the
    penalty for a trajectory whose longest sequence comes near `max_tokens`.
    """
    turns = [trajectory.turns for trajectory in trajectories]
    owner = torch.tensor([e for e, own in enumerate(turns) for _ in own], dtype=torch.int64)
    reward = torch.tensor([turn.reward for own in turns for turn in own], dtype=torch.float64)
    final = torch.tensor([trajectory.reward for trajectory in trajectories], dtype=torch.float64)
    extra = final - segment_sum(reward, owner, len(turns))
    if algorithm.overlong_buffer is not None and algorithm.overlong_factor is not None:
        length = torch.tensor([max((len(s) for s in t.sequences), default=0) for t in trajectories])
        extra = extra + overlong_penalty(
            length, longest=max_tokens, buffer=algorithm.overlong_buffer, factor=algorithm.overlong_factor
        )
    valid = torch.tensor([turn.valid for own in turns for turn in own], dtype=torch.bool)
    shaped = reward + invalid_penalty(valid, algorithm.invalid_penalty)
    returns = extra + segment_sum(shaped, owner, len(turns))
    last = torch.tensor([len(own) for own in turns]).cumsum(0) - 1
    has_turns = torch.tensor([bool(own) for own in turns])
    return ShapedRewards(
        returns=returns,
        turn_reward=shaped.index_add(0, last[has_turns], extra[has_turns]),
        turn_episode=owner,
    )
