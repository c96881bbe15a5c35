"""Differences within groups: tests whether an estimator can distinguish the episodes of a group.

estimator compares                             a group's episodes differ if
---------------------------------------------  ----------------------------------------------------------
members of a group, or with a greedy rollout   some token has an advantage: from a component (`gdpo`), the
                                               return from a state on (`gigpo`, `hgpo`) or from a turn on
                                               (`turn_discounted`), or the whole return
nothing, or what a model computes (a critic,   the returns differ, or the rewards of some turn do
a process reward model, or the policy)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from agentrl.algorithms.segments import differs
from agentrl.algorithms.traits import Input, compares_group, needed_inputs
from agentrl.algorithms.types import EpisodeBatch, Estimate
from agentrl.reward import MIN_DIFFERENCE, ROUNDING

MODELS = frozenset({Input.VALUES, Input.PROCESS_REWARD, Input.SCORE_NORM})
"""Inputs from models, which are computed only after the groups have been selected."""


def uses_own_advantages(estimator: Callable[..., object]) -> bool:
    """Return True if the estimator's own advantages determine whether the episodes of a group differ."""
    needed = needed_inputs(estimator)
    return (compares_group.of(estimator) or Input.GREEDY_RETURN in needed) and not needed & MODELS


def groups_with_advantages(
    estimate: Callable[[EpisodeBatch], torch.Tensor | Estimate], episodes: EpisodeBatch
) -> torch.Tensor:
    """Mark the groups in which an estimator gives any token an advantage: bool [groups].

    Each group is estimated separately, so that whitening over the batch does not create advantages. An advantage counts
    if it exceeds the rounding error of the returns or, where rewards differ, of numbers of magnitude 1: normalized
    advantages have this magnitude, whatever the scale of the rewards.
    """
    found = []
    for number in range(episodes.groups):
        group = episodes.select_group(number)
        if group.token_turn.numel() == 0:
            found.append(False)
            continue
        result = estimate(group)
        advantage = result.advantage if isinstance(result, Estimate) else result
        size = float(group.returns.abs().max())
        if size > 1 and _any_rewards_differ(group):
            size = 1.0
        found.append(float(advantage.abs().max()) > MIN_DIFFERENCE + ROUNDING * size)
    return torch.tensor(found)


def _any_rewards_differ(group: EpisodeBatch) -> bool:
    """Return True if the rewards of a group's turns, or its reward components, differ by more than rounding."""
    return bool(groups_with_different_rewards(group).any()) or any(
        bool(differs(values, group.group, group.groups).any()) for values in group.components.values()
    )


def groups_with_different_rewards(episodes: EpisodeBatch) -> torch.Tensor:
    """Mark the groups in which returns, or the rewards of turns with the same number, differ: bool [groups].

    The last turns of episodes are compared with each other, so that episodes of different lengths with equal final
    rewards count as equal.
    """
    count, turns = episodes.returns.numel(), episodes.turn_episode
    sizes = torch.bincount(turns, minlength=count)
    number = torch.arange(turns.numel(), device=turns.device) - (sizes.cumsum(0) - sizes)[turns]
    is_last = number == sizes[turns] - 1
    width = int(sizes.max()) + 1
    rewards = episodes.returns.new_zeros(count, width)
    rewards[turns, torch.where(is_last, width - 1, number)] = episodes.turn_reward
    apart = differs(episodes.returns, episodes.group, episodes.groups)
    for column in rewards.unbind(1):
        apart = apart | differs(column, episodes.group, episodes.groups)
    return apart
