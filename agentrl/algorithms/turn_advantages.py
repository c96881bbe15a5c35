"""Advantage estimators that compare single turns of a group's episodes, without a critic.

Turns are compared if they were taken in the same state, after the same states, or at the same place in their episodes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Literal

import torch

from agentrl.algorithms.advantages import dr_grpo, grpo, turn_returns
from agentrl.algorithms.options import Depth, Discount, NotNegative
from agentrl.algorithms.segments import (
    deviation,
    exceeds,
    segment_sizes,
    segment_sum,
    standardize,
    subtract_mean,
)
from agentrl.algorithms.traits import compares_group
from agentrl.algorithms.types import EpisodeBatch


@compares_group
def gigpo(
    episodes: EpisodeBatch, *, omega: NotNegative = 1.0, gamma: Discount = 0.95, normalize: bool = True
) -> torch.Tensor:
    """A = A_episode + omega A_step: [tokens] (GiGPO, arXiv 2505.10978, section 4).

    A_episode is the advantage of `grpo`. A_step compares the discounted return G_k = s_k + gamma G_{k+1} of a turn with
    those of all turns of its group that were taken in the same state: G_k minus their mean, divided by their standard
    deviation. A_step is 0 for a state that occurs once. Without ``normalize``, nothing is divided by a deviation.
    """
    step = _compare(turn_returns(episodes, gamma), episodes.turn_state, normalize)
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
    """A = sum_h w_h A_h, h = 0..H: G_k among turns with the same state and last h states: [tokens] (arXiv 2602.22817).

    At depth h, a turn is compared with the turns of its group that were taken in the same state after the same h
    states: A_h is G_k minus their mean, divided by their standard deviation (with divisor n). w_h is proportional to
    (h + 2)^alpha over the depths at which A_h is not 0; a depth at which no other turn matches, or the turn has fewer
    than h states before it, does not count. This follows the authors' code (verl-agent, ``recipe/hgpo``), which counts
    the state itself as the first of the context.

    ``depth`` is H. With ``omega``, A is the advantage of `grpo` plus omega times the sum above, as in `gigpo`; the
    authors do not add `grpo`. Without ``normalize``, nothing is divided by a deviation.
    """
    returns = turn_returns(episodes, gamma)
    total, weights = torch.zeros_like(returns), torch.zeros_like(returns)
    for h, context in enumerate(contexts(episodes, depth)):
        weight = (h + 2) ** alpha
        known = context >= 0
        advantage = torch.zeros_like(returns)
        if bool(known.any()):
            advantage[known] = _compare(returns[known], context[known], normalize, unbiased=False)
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
    return _compare(turn_returns(episodes, gamma), group, normalize=True)[episodes.token_turn]


@compares_group
def turn_rloo(
    episodes: EpisodeBatch, *, gamma: Discount = 1.0, compare: Literal["turn_index", "state"] = "turn_index"
) -> torch.Tensor:
    """A = G_k - mean G_k of the group's other episodes that reached turn k: [tokens]; G_k = s_k + gamma G_{k+1}.

    With ``compare: state``, the mean is over the turns that other episodes took in the same state. If there is none, it
    is the mean return of the other episodes. As no part of a baseline depends on the own episode, the sum over tokens
    of A grad log pi is an unbiased policy gradient even if the policy decides when an episode ends. Estimators whose
    mean includes the own episode scale each turn by (m - 1) / m, where m is the number of episodes that reached it.
    """
    returns, count = turn_returns(episodes, gamma), episodes.returns.numel()
    group = episodes.group[episodes.turn_episode]
    if compare == "state":
        key = episodes.turn_state
    else:
        number = turn_numbers(episodes)
        key = group * (int(number.max()) + 1) + number
    own = torch.unique(key * count + episodes.turn_episode, return_inverse=True)[1]
    keys, pairs = int(key.max()) + 1, int(own.max()) + 1
    others = segment_sizes(key, keys)[key] - segment_sizes(own, pairs)[own]
    total = segment_sum(returns, key, keys)[key] - segment_sum(returns, own, pairs)[own]
    members = segment_sizes(episodes.group, episodes.groups)[episodes.group]
    rest = segment_sum(episodes.returns, episodes.group, episodes.groups)[episodes.group] - episodes.returns
    unmatched = torch.where(members > 1, rest / (members - 1).clamp(min=1), episodes.returns)[episodes.turn_episode]
    baseline = torch.where(others > 0, total / others.clamp(min=1), unmatched)
    return deviation(returns, baseline, group, episodes.groups)[episodes.token_turn]


GOAL = -1
"""Node of the graph of `graphgpo` that stands for success."""


@compares_group
def graphgpo(
    episodes: EpisodeBatch,
    *,
    omega: NotNegative = 1.0,
    gamma: Discount = 0.1,
    above: float = 0.0,
    normalize: bool = True,
) -> torch.Tensor:
    """A = A_episode + omega A_step, A_step of 10 gamma^D, D turns from the next state to success (arXiv 2605.26684).

    The states of a group's episodes are the nodes of a graph, and their turns its edges. D is the length of the
    shortest path, over the turns of all episodes of the group, from the state after the turn to success, which follows
    the last turn of episodes with a return greater than ``above``. A state without a path has the greatest length plus
    one. A_step compares turns that were taken in the same state, as in `gigpo`: [tokens].

    This follows the authors' code (GraphGPO, on verl-agent), except that the end of a failed episode is a state of its
    own here, even if another episode made the same observation.
    """
    following = _following_states(episodes, above)
    distance = _distances_to_goal(episodes, following)
    step = _compare(10 * gamma**distance, episodes.turn_state, normalize)
    whole = grpo(episodes) if normalize else dr_grpo(episodes)
    return whole + omega * step[episodes.token_turn]


def _following_states(episodes: EpisodeBatch, above: float) -> list[int]:
    """Return the state after each turn: `GOAL` after the last turn of a success, a unique number after other ends."""
    states, owner = episodes.turn_state.tolist(), episodes.turn_episode.tolist()
    success, count = exceeds(episodes.returns, above).tolist(), len(states)
    ends = len(set(states)) + max(states) + 1  # numbers from here on are not those of states
    found = [*states[1:], ends]
    for turn in range(count):
        if turn == count - 1 or owner[turn] != owner[turn + 1]:
            found[turn] = GOAL if success[owner[turn]] else ends + turn
    return found


def _distances_to_goal(episodes: EpisodeBatch, following: list[int]) -> torch.Tensor:
    """Count the turns on the shortest path to success from the state after each turn: [turns]."""
    groups = episodes.group[episodes.turn_episode].tolist()
    before: dict[tuple[int, int], list[int]] = defaultdict(list)
    for group, state, after in zip(groups, episodes.turn_state.tolist(), following, strict=True):
        before[group, after].append(state)
    length: dict[tuple[int, int], int] = {(group, GOAL): 0 for group in set(groups)}
    longest, queue = dict.fromkeys(set(groups), 0), deque(length)
    while queue:
        group, node = queue.popleft()
        longest[group] = length[group, node]
        for state in before[group, node]:
            if (group, state) not in length:
                length[group, state] = length[group, node] + 1
                queue.append((group, state))
    far = {group: steps + 1 for group, steps in longest.items()}
    pairs = zip(groups, following, strict=True)
    return episodes.turn_reward.new_tensor([length.get((group, node), far[group]) for group, node in pairs])


def contexts(episodes: EpisodeBatch, depth: int) -> list[torch.Tensor]:
    """Number the sequences of the last h + 1 states at each turn, for h = 0..depth: int64 [turns] each.

    Equal sequences have equal numbers; turns with fewer states have -1.
    """
    found, number = [episodes.turn_state], turn_numbers(episodes)
    for h in range(1, depth + 1):
        pairs = torch.stack([found[-1], episodes.turn_state.roll(h)], dim=1)
        pairs[number < h] = -1
        found.append(torch.unique(pairs, dim=0, return_inverse=True)[1])
        found[-1] = torch.where(number < h, -1, found[-1])
    return found


def turn_numbers(episodes: EpisodeBatch) -> torch.Tensor:
    """Number the turns within each episode, from 0: int64 [turns]."""
    index = torch.arange(episodes.turn_episode.numel(), device=episodes.turn_episode.device)
    sizes = torch.bincount(episodes.turn_episode, minlength=episodes.returns.numel())
    return index - (sizes.cumsum(0) - sizes)[episodes.turn_episode]


def _compare(returns: torch.Tensor, segment: torch.Tensor, normalize: bool, *, unbiased: bool = True) -> torch.Tensor:
    """Compare returns with the others of their segment: [turns]."""
    count = int(segment.max()) + 1
    if normalize:
        return standardize(returns, segment, count, unbiased=unbiased)
    return subtract_mean(returns, segment, count)
