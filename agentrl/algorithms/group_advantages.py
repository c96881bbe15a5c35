"""Advantages of an episode against the other members of its group; every token of the episode gets the same."""

from __future__ import annotations

import torch

from agentrl.algorithms.episodes import EpisodeBatch
from agentrl.algorithms.marks import compares_group
from agentrl.algorithms.segments import STD_EPSILON, segment_mean, segment_sizes, segment_std, whiten


@compares_group
def grpo(episodes: EpisodeBatch) -> torch.Tensor:
    """A = (R - mean_g) / (std_g + 1e-6): [tokens] (DeepSeekMath, arXiv 2402.03300, section 4.1)."""
    std = segment_std(episodes.returns, episodes.group, episodes.groups)[episodes.group]
    return episodes.to_tokens(centred_returns(episodes) / (std + STD_EPSILON))


@compares_group
def dr_grpo(episodes: EpisodeBatch) -> torch.Tensor:
    """A = R - mean_g: [tokens]; meant for aggregation seq-mean-token-sum-norm (Dr. GRPO, arXiv 2503.20783)."""
    return episodes.to_tokens(centred_returns(episodes))


@compares_group
def rloo(episodes: EpisodeBatch) -> torch.Tensor:
    """A = R - mean of the others = n / (n - 1) (R - mean_g): [tokens] (RLOO, arXiv 2402.14740)."""
    size = segment_sizes(episodes.group, episodes.groups)[episodes.group]
    return episodes.to_tokens(centred_returns(episodes) * size / (size - 1))


@compares_group
def reinforce_plus_plus_baseline(episodes: EpisodeBatch) -> torch.Tensor:
    """A = R - mean_g, whitened over the tokens of the batch: [tokens] (REINFORCE++, arXiv 2501.03262)."""
    return whiten(episodes.to_tokens(centred_returns(episodes)))


def centred_returns(episodes: EpisodeBatch) -> torch.Tensor:
    """R - mean_g: [episodes]."""
    return episodes.returns - segment_mean(episodes.returns, episodes.group, episodes.groups)[episodes.group]
