"""Advantages from discounted returns-to-go, without a group."""

from __future__ import annotations

import torch

from agentrl.algorithms.episodes import EpisodeBatch
from agentrl.algorithms.given import given
from agentrl.algorithms.marks import Input, needs
from agentrl.algorithms.ranges import Discount
from agentrl.algorithms.segments import backward_sums, deviation, whiten


def reinforce(episodes: EpisodeBatch, *, gamma: Discount = 1.0) -> torch.Tensor:
    """A = G_k = s_k + gamma G_{k+1}, the return-to-go over turns, the same for each token of turn k: [tokens]."""
    return turn_returns(episodes, gamma)[episodes.token_turn]


def reinforce_plus_plus(episodes: EpisodeBatch, *, gamma: Discount = 1.0) -> torch.Tensor:
    """A = whitened G_t = r_t + gamma G_{t+1} over sampled tokens: [tokens] (REINFORCE++, arXiv 2501.03262).

    A turn's reward falls on its last token. Whitening is over the sampled tokens of the batch.
    """
    return whiten(token_returns(episodes, episodes.token_rewards(), gamma))


@needs(Input.GREEDY_RETURN)
def remax(episodes: EpisodeBatch) -> torch.Tensor:
    """A = R minus the return of a greedy rollout of the same task: [tokens] (ReMax, arXiv 2310.10505)."""
    baseline = given(episodes.greedy_return, Input.GREEDY_RETURN)[episodes.group]
    return episodes.to_tokens(deviation(episodes.returns, baseline, episodes.group, episodes.groups))


def turn_returns(episodes: EpisodeBatch, gamma: float) -> torch.Tensor:
    """G_k = s_k + gamma G_{k+1} within each episode: [turns]."""
    return backward_sums(episodes.turn_reward, torch.full_like(episodes.turn_reward, gamma), episodes.turn_episode)


def token_returns(episodes: EpisodeBatch, rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """G_t = r_t + gamma G_{t+1} within each episode, in the order of time: [tokens] from rewards [tokens]."""
    order = episodes.time_order
    returns = torch.empty_like(rewards)
    returns[order] = backward_sums(rewards[order], torch.full_like(rewards, gamma), episodes.token_episode[order])
    return returns
