"""Advantages from discounted returns-to-go, without a group."""

from __future__ import annotations

import torch

from agentrl.algorithms.episodes import EpisodeBatch
from agentrl.algorithms.segments import whiten


def reinforce(episodes: EpisodeBatch, *, gamma: float = 1.0) -> torch.Tensor:
    """A = G_k = s_k + gamma G_{k+1}, the return-to-go over turns, the same for each token of turn k: [tokens]."""
    return turn_returns(episodes, discount=torch.full_like(episodes.turn_reward, gamma))[episodes.token_turn]


def reinforce_plus_plus(episodes: EpisodeBatch, *, gamma: float = 1.0) -> torch.Tensor:
    """A = whitened G_t, the return-to-go over sampled tokens: [tokens] (REINFORCE++, arXiv 2501.03262).

    A turn's reward falls on its last token, so G_t = gamma^(tokens to the turn's end) E_k, with
    E_k = s_k + gamma^(tokens of turn k+1) E_{k+1}. Whitening is over the sampled tokens of the batch.
    """
    lengths = episodes.turn_tokens
    following = torch.cat([lengths[1:], lengths.new_zeros(1)])
    ends = turn_returns(episodes, discount=gamma ** following.to(episodes.turn_reward.dtype))
    return whiten(gamma ** tokens_to_turn_end(episodes).to(ends.dtype) * ends[episodes.token_turn])


def turn_returns(episodes: EpisodeBatch, *, discount: torch.Tensor) -> torch.Tensor:
    """G_k = s_k + discount_k G_{k+1} within each episode: [turns]."""
    rewards, owners, factors = episodes.turn_reward.tolist(), episodes.turn_episode.tolist(), discount.tolist()
    returns = rewards.copy()
    for k in range(len(returns) - 2, -1, -1):
        if owners[k] == owners[k + 1]:
            returns[k] += factors[k] * returns[k + 1]
    return episodes.turn_reward.new_tensor(returns)


def tokens_to_turn_end(episodes: EpisodeBatch) -> torch.Tensor:
    """How many sampled tokens follow each token in its turn: int64 [tokens]."""
    index = torch.arange(episodes.token_turn.numel(), device=episodes.token_turn.device)
    last = index.new_zeros(episodes.turn_reward.numel()).scatter_reduce(0, episodes.token_turn, index, "amax")
    return last[episodes.token_turn] - index
