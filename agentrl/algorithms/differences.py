"""Differences within groups: whether what an estimator compares tells the episodes of a group apart.

estimator                                      a group's episodes differ where
---------------------------------------------  ----------------------------------------------------------
compares the members of a group, or with a     it gives some token an advantage: a component (`gdpo`), the
greedy rollout                                 return from a state on (`gigpo`, `hgpo`) or from a turn on
                                               (`turn_discounted`), or the whole return
compares nothing, or a critic's or a process   the returns differ, or the rewards of some turn do
reward model's values
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from agentrl.algorithms.segments import differs
from agentrl.algorithms.traits import Input, compares_group, needed_inputs
from agentrl.algorithms.types import EpisodeBatch, Estimate
from agentrl.reward import LEAST_DIFFERENCE, ROUNDING

MODELS = frozenset({Input.VALUES, Input.PROCESS_REWARD})
"""Inputs that a model of their own gives, after the episodes were chosen."""


def judges_itself(estimator: Callable[..., object]) -> bool:
    """Return True if the estimator's own advantages say whether the episodes of a group differ."""
    needed = needed_inputs(estimator)
    return (compares_group.of(estimator) or Input.GREEDY_RETURN in needed) and not needed & MODELS


def groups_with_advantages(
    estimate: Callable[[EpisodeBatch], torch.Tensor | Estimate], episodes: EpisodeBatch
) -> torch.Tensor:
    """Return in which groups an estimator gives an advantage to any token: bool [groups].

    Each group is estimated alone, so that whitening over the batch does not give a group advantages that has none.
    """
    found = []
    for number in range(episodes.groups):
        alone = episodes.of_group(number)
        if alone.token_turn.numel() == 0:
            found.append(False)
            continue
        given = estimate(alone)
        advantage = given.advantage if isinstance(given, Estimate) else given
        bound = LEAST_DIFFERENCE + ROUNDING * float(alone.returns.abs().max())
        found.append(float(advantage.abs().max()) > bound)
    return torch.tensor(found)


def groups_with_rewards_apart(episodes: EpisodeBatch) -> torch.Tensor:
    """Return in which groups returns differ, or the rewards of turns with the same number: bool [groups].

    The last turn of each episode is compared with the last ones of the others, whatever their numbers: episodes that
    earn the same at their end are alike, however long they took.
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
