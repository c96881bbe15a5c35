"""Advantages of a turn against other turns that were taken in the same state."""

from __future__ import annotations

import torch

from agentrl.algorithms.episodes import EpisodeBatch
from agentrl.algorithms.group_advantages import centred_returns, grpo
from agentrl.algorithms.marks import compares_group
from agentrl.algorithms.return_advantages import turn_returns
from agentrl.algorithms.segments import STD_EPSILON, segment_mean, segment_std


@compares_group
def gigpo(episodes: EpisodeBatch, *, omega: float = 1.0, gamma: float = 0.95, normalize: bool = True) -> torch.Tensor:
    """A = A_episode + omega A_step: [tokens] (GiGPO, arXiv 2505.10978, section 4).

    A_episode is that of `grpo`. A_step compares the discounted return G_k = s_k + gamma G_{k+1} of a turn with those of
    all turns of its group that were taken in the same state: G_k minus their mean, over their standard deviation. A
    state that was seen once gives 0. Without ``normalize`` neither part is divided by a deviation.
    """
    returns = turn_returns(episodes, discount=torch.full_like(episodes.turn_reward, gamma))
    states = int(episodes.turn_state.max()) + 1
    step = returns - segment_mean(returns, episodes.turn_state, states)[episodes.turn_state]
    if normalize:
        step = step / (segment_std(returns, episodes.turn_state, states)[episodes.turn_state] + STD_EPSILON)
    whole = grpo(episodes) if normalize else episodes.to_tokens(centred_returns(episodes))
    return whole + omega * step[episodes.token_turn]
