"""Advantages of a turn against other turns: those taken in the same state, or those of the same group."""

from __future__ import annotations

from typing import Literal

import torch

from agentrl.algorithms.episodes import EpisodeBatch
from agentrl.algorithms.group_advantages import dr_grpo, grpo
from agentrl.algorithms.marks import compares_group
from agentrl.algorithms.ranges import Depth, Discount, NotNegative
from agentrl.algorithms.return_advantages import turn_returns
from agentrl.algorithms.segments import centred, standardize


@compares_group
def gigpo(
    episodes: EpisodeBatch, *, omega: NotNegative = 1.0, gamma: Discount = 0.95, normalize: bool = True
) -> torch.Tensor:
    """A = A_episode + omega A_step: [tokens] (GiGPO, arXiv 2505.10978, section 4).

    A_episode is that of `grpo`. A_step compares the discounted return G_k = s_k + gamma G_{k+1} of a turn with those of
    all turns of its group that were taken in the same state: G_k minus their mean, over their standard deviation. A
    state that was seen once gives 0. Without ``normalize`` neither part is divided by a deviation.
    """
    step = _among(turn_returns(episodes, gamma), episodes.turn_state, normalize)
    whole = grpo(episodes) if normalize else dr_grpo(episodes)
    return whole + omega * step[episodes.token_turn]


@compares_group
def hgpo(
    episodes: EpisodeBatch,
    *,
    depth: Depth = 2,
    alpha: NotNegative = 1.0,
    omega: NotNegative | None = None,
    gamma: Discount = 0.95,
    normalize: bool = True,
) -> torch.Tensor:
    """A = sum_h w_h A_h, h = 0..H: G_k among turns that share the last h states, too: [tokens] (arXiv 2602.22817).

    At depth h a turn is compared with the turns of its group that were taken in the same state after the same h states:
    A_h is G_k minus their mean, over their deviation (that of all members, dividing by n). w_h is proportional to
    (h + 2)^alpha over the depths at which the turn differs from others; a depth at which it stands alone, or has fewer
    than h states behind it, does not count. This is the recipe of the authors' code (verl-agent, ``recipe/hgpo``),
    which counts the state itself as the first of the context.

    Args:
        episodes: The step.
        depth: H.
        alpha: How much more a longer common past counts; 0 not at all.
        omega: With it, A is that of `grpo` plus omega times the above, as in `gigpo`; the authors leave `grpo` out.
        gamma: Discount of the returns, per turn.
        normalize: Divide by standard deviations.
    """
    returns = turn_returns(episodes, gamma)
    total, weights = torch.zeros_like(returns), torch.zeros_like(returns)
    for h, context in enumerate(contexts(episodes, depth)):
        weight = (h + 2) ** alpha
        known = context >= 0
        advantage = torch.zeros_like(returns)
        if bool(known.any()):
            advantage[known] = _among(returns[known], context[known], normalize, unbiased=False)
        total, weights = total + weight * advantage, weights + weight * (advantage != 0)
    step = (total / torch.where(weights > 0, weights, 1.0))[episodes.token_turn]
    if omega is None:
        return step
    return (grpo(episodes) if normalize else dr_grpo(episodes)) + omega * step


@compares_group
def turn_discounted(
    episodes: EpisodeBatch,
    *,
    gamma: Discount = 0.95,
    normalize_over: Literal["turn_index", "all_turns"] = "turn_index",
) -> torch.Tensor:
    """A = (G_k - mean) / (std + 1e-6), G_k = s_k + gamma G_{k+1}: [tokens].

    Mean and deviation are over the turns of the group with the same number (``turn_index``), or over all turns of the
    group (``all_turns``).
    """
    group = episodes.group[episodes.turn_episode]
    if normalize_over == "turn_index":
        number = turn_numbers(episodes)
        group = group * (int(number.max()) + 1) + number
    return _among(turn_returns(episodes, gamma), group, normalize=True)[episodes.token_turn]


def contexts(episodes: EpisodeBatch, depth: int) -> list[torch.Tensor]:
    """For h = 0..depth, the number of the last h + 1 states at each turn, equal where they are; -1 where an episode has
    not seen as many: int64 [turns] each.
    """
    found, number = [episodes.turn_state], turn_numbers(episodes)
    for h in range(1, depth + 1):
        pairs = torch.stack([found[-1], episodes.turn_state.roll(h)], dim=1)
        pairs[number < h] = -1
        found.append(torch.unique(pairs, dim=0, return_inverse=True)[1])
        found[-1] = torch.where(number < h, -1, found[-1])
    return found


def turn_numbers(episodes: EpisodeBatch) -> torch.Tensor:
    """Number of each turn within its episode, from 0: int64 [turns]."""
    index = torch.arange(episodes.turn_episode.numel(), device=episodes.turn_episode.device)
    sizes = torch.bincount(episodes.turn_episode, minlength=episodes.returns.numel())
    return index - (sizes.cumsum(0) - sizes)[episodes.turn_episode]


def _among(returns: torch.Tensor, segment: torch.Tensor, normalize: bool, *, unbiased: bool = True) -> torch.Tensor:
    """Returns against those of their segment: [turns]."""
    count = int(segment.max()) + 1
    if normalize:
        return standardize(returns, segment, count, unbiased=unbiased)
    return centred(returns, segment, count)
