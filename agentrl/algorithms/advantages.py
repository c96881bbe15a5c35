"""Advantage estimators without a critic.

Group estimators compare an episode with the other members of its group; all tokens of the episode get the same
advantage. Others use discounted returns-to-go. The estimators from `gigpo` on compare single turns of a group's
episodes: turns with the same state, the same preceding states, or the same position in their episodes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Literal

import torch

from agentrl.algorithms.options import Depth, Discount, NotNegative
from agentrl.algorithms.segments import (
    STD_EPSILON,
    backward_sums,
    deviation,
    differs,
    exceeds,
    segment_mean,
    segment_sizes,
    segment_std,
    segment_sum,
    standardize,
    subtract_mean,
    whiten,
)
from agentrl.algorithms.traits import Input, compares_group, needs
from agentrl.algorithms.types import EpisodeBatch, require
from agentrl.errors import TrainingError
from agentrl.reward import MIN_DIFFERENCE


@compares_group
def grpo(episodes: EpisodeBatch) -> torch.Tensor:
    """A = (R - mean_g) / (std_g + 1e-6): [tokens] (DeepSeekMath, arXiv 2402.03300, section 4.1)."""
    return episodes.to_tokens(standardize(episodes.returns, episodes.group, episodes.groups))


@compares_group
def grpo_batch_std(episodes: EpisodeBatch) -> torch.Tensor:
    """A = (R - mean_g) / (std + 1e-6), std over the episodes of the batch: [tokens] (arXiv 2508.08221).

    This is ``scale_rewards="batch"`` of TRL. It does not up-weight groups that are easier or harder than others.
    """
    everyone = torch.zeros_like(episodes.group)
    std = segment_std(episodes.returns, everyone, 1)
    return episodes.to_tokens(centred_returns(episodes) / (std + STD_EPSILON))


def prpo(episodes: EpisodeBatch) -> torch.Tensor:
    """A = (R - mean) / (std + 1e-6), over all episodes of the batch, std with divisor n: [tokens] (PRPO of rLLM).

    Episodes of different tasks are compared, so episodes of easy tasks get positive advantages; groups of one suffice.
    """
    everyone = torch.zeros_like(episodes.group)
    return episodes.to_tokens(standardize(episodes.returns, everyone, 1, unbiased=False))


@compares_group
def dr_grpo(episodes: EpisodeBatch) -> torch.Tensor:
    """A = R - mean_g: [tokens]; meant for aggregation seq-mean-token-sum-norm (Dr. GRPO, arXiv 2503.20783)."""
    return episodes.to_tokens(centred_returns(episodes))


@compares_group
def rloo(episodes: EpisodeBatch) -> torch.Tensor:
    """A = R - mean of the other members = n / (n - 1) (R - mean_g): [tokens] (RLOO, arXiv 2402.14740)."""
    return episodes.to_tokens(subtract_mean_of_others(episodes.returns, episodes))


@compares_group
def reinforce_plus_plus_baseline(episodes: EpisodeBatch) -> torch.Tensor:
    """A = R - mean_g, whitened over the tokens of the batch: [tokens] (REINFORCE++, arXiv 2501.03262)."""
    return whiten(episodes.to_tokens(centred_returns(episodes)))


@compares_group
def opo(episodes: EpisodeBatch) -> torch.Tensor:
    """A = R - sum_i(len_i R_i) / sum_i(len_i) over the group: [tokens] (OPO, arXiv 2505.23585).

    len is the number of an episode's sampled tokens.
    """
    length = episodes.episode_tokens.to(episodes.returns.dtype)
    weighted = segment_sum(length * episodes.returns, episodes.group, episodes.groups)
    baseline = weighted / segment_sum(length, episodes.group, episodes.groups).clamp(min=1)
    return episodes.to_tokens(deviation(episodes.returns, baseline[episodes.group], episodes.group, episodes.groups))


@compares_group
def gpg(episodes: EpisodeBatch) -> torch.Tensor:
    """A = alpha (R - mean_g), alpha = episodes / episodes with R != mean_g: [tokens] (GPG, arXiv 2504.02546)."""
    advantage = centred_returns(episodes)
    informative = int((advantage != 0).sum())
    return episodes.to_tokens(advantage * (advantage.numel() / max(informative, 1)))


@compares_group
def maxrl(episodes: EpisodeBatch) -> torch.Tensor:
    """A = (R - mean_g) / mean_g where mean_g > 0, else 0: [tokens] (MaxRL, arXiv 2602.02710).

    Raises:
        TrainingError: a return is negative.
    """
    if bool((episodes.returns < -MIN_DIFFERENCE).any()):
        raise TrainingError(
            "maxrl divides by the mean return of a group",
            got=f"a return of {float(episodes.returns.min()):g}",
            expected="returns of at least 0, after shaping",
        )
    mean = segment_mean(episodes.returns, episodes.group, episodes.groups)[episodes.group]
    return episodes.to_tokens(torch.where(mean > 0, centred_returns(episodes) / torch.where(mean > 0, mean, 1.0), 0.0))


@compares_group
def grpo_passk(episodes: EpisodeBatch) -> torch.Tensor:
    """A = (R_max - R_second) / (std_g + 1e-6) for the best of a group, 0 for others: [tokens] (arXiv 2503.19595)."""
    std = segment_std(episodes.returns, episodes.group, episodes.groups)
    baseline = episodes.returns.clone()
    for group in range(episodes.groups):
        members = (episodes.group == group).nonzero().squeeze(-1)
        if members.numel() > 1:
            own = episodes.returns[members]
            baseline[members[own.argmax()]] = own.topk(2)[0][1]
    margin = deviation(episodes.returns, baseline, episodes.group, episodes.groups)
    return episodes.to_tokens(margin / (std[episodes.group] + STD_EPSILON))


@needs(Input.COMPONENTS)
@compares_group
def gdpo(episodes: EpisodeBatch, *, weights: Mapping[str, float] | None = None) -> torch.Tensor:
    """A = sum_c w_c (C_c - mean_g) / (std_g + 1e-6), whitened over the episodes: [tokens] (GDPO, arXiv 2601.05242).

    ``weights`` are w_c by name, by default 1; a weight of 0 excludes a component.

    Raises:
        TrainingError: an episode has no components or lacks one, or a weight names an unknown component.
    """
    given, named = episodes.components, dict(weights or {})
    _check_components(given, named)
    total = torch.zeros_like(episodes.returns)
    for name, values in given.items():
        total = total + named.get(name, 1.0) * standardize(values, episodes.group, episodes.groups)
    return episodes.to_tokens(whiten(total))


def _check_components(given: Mapping[str, torch.Tensor], weights: Mapping[str, float]) -> None:
    unknown = sorted(weights.keys() - given.keys())
    partial = sorted(name for name, values in given.items() if not bool(values.isfinite().all()))
    if given and not unknown and not partial:
        return
    raise TrainingError(
        "gdpo normalizes every component of the reward",
        got=f"episodes without {partial[0]!r}" if partial else f"the components {', '.join(given) or '(none)'}",
        expected=f"one named {unknown[0]!r}" if unknown else "the same components in every episode, at least one",
        hint="list several reward functions in agent.reward, or return reward_components from the environment",
    )


def centred_returns(episodes: EpisodeBatch) -> torch.Tensor:
    """Compute R - mean_g: [episodes]."""
    return subtract_mean(episodes.returns, episodes.group, episodes.groups)


def subtract_mean_of_others(values: torch.Tensor, episodes: EpisodeBatch) -> torch.Tensor:
    """Subtract the mean of the group's other members from values: [episodes]; 0 for a group of one."""
    size = segment_sizes(episodes.group, episodes.groups)[episodes.group]
    return subtract_mean(values, episodes.group, episodes.groups) * size / (size - 1).clamp(min=1)


def reinforce(episodes: EpisodeBatch, *, gamma: Discount = 1.0) -> torch.Tensor:
    """A = G_k = s_k + gamma G_{k+1}, the return-to-go over turns, the same for each token of turn k: [tokens]."""
    return turn_returns(episodes, gamma)[episodes.token_turn]


def reinforce_plus_plus(episodes: EpisodeBatch, *, gamma: Discount = 1.0) -> torch.Tensor:
    """A = whitened G_t = r_t + gamma G_{t+1} over sampled tokens: [tokens] (REINFORCE++, arXiv 2501.03262).

    A turn's reward belongs to its last token. Whitening is over the sampled tokens of the batch.
    """
    return whiten(token_returns(episodes, episodes.token_rewards(), gamma))


@needs(Input.ROLE_KIND)
def trr_plus_plus(episodes: EpisodeBatch, *, gamma: Discount = 1.0) -> torch.Tensor:
    """A = `reinforce++`, whitened over the tokens of each role and type of task: [tokens] (TRR++, arXiv 2505.03335).

    Task-relative REINFORCE++ of Absolute Zero: proposers are compared only with proposers of the same kind of task, and
    solvers only with solvers of that kind, so that easy kinds do not raise the baseline of hard kinds. It needs no
    groups.
    """
    role_kind = require(episodes.role_kind, Input.ROLE_KIND)
    returns = token_returns(episodes, episodes.token_rewards(), gamma)
    return standardize(returns, role_kind[episodes.token_episode], int(role_kind.max()) + 1)


@needs(Input.GREEDY_RETURN)
def remax(episodes: EpisodeBatch) -> torch.Tensor:
    """A = R - return of a greedy rollout of the same task: [tokens] (ReMax, arXiv 2310.10505)."""
    baseline = require(episodes.greedy_return, Input.GREEDY_RETURN)[episodes.group]
    return episodes.to_tokens(deviation(episodes.returns, baseline, episodes.group, episodes.groups))


def turn_returns(episodes: EpisodeBatch, gamma: float) -> torch.Tensor:
    """Compute G_k = s_k + gamma G_{k+1} within each episode: [turns]."""
    return backward_sums(episodes.turn_reward, torch.full_like(episodes.turn_reward, gamma), episodes.turn_episode)


def token_returns(episodes: EpisodeBatch, rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """Compute G_t = r_t + gamma G_{t+1} within each episode, in the order of time: [tokens] from rewards [tokens]."""
    order = episodes.time_order
    returns = torch.empty_like(rewards)
    returns[order] = backward_sums(rewards[order], torch.full_like(rewards, gamma), episodes.token_episode[order])
    return returns


@needs(Input.PROCESS_REWARD)
@compares_group
def prime(episodes: EpisodeBatch, *, gamma: Discount = 1.0) -> torch.Tensor:
    """A = `rloo` + return-to-go of (p_t - mean p of the other members): [tokens] (PRIME, arXiv 2502.01456, equation 5).

    p_t is the implicit process reward of a token. The mean over other members weights each member's token mean equally,
    regardless of its length.
    """
    process = require(episodes.process_reward, Input.PROCESS_REWARD)
    own = segment_mean(process, episodes.token_episode, episodes.returns.numel())
    others = own - subtract_mean_of_others(own, episodes)
    return rloo(episodes) + token_returns(episodes, process - episodes.to_tokens(others), gamma)


MIN_PATH_VARIANCE = 1e-8
"""Term added to sums of weights in `otb`, as in verl."""


@needs(Input.SCORE_NORM)
@compares_group
def otb(episodes: EpisodeBatch, *, zero_tail: bool = True) -> torch.Tensor:
    """A = G_t - sum_g(W_t G_t) / (sum_g(W_t) + 1e-8), W_t = sum_{u <= t} 1 - 2 pi + sum pi^2: [tokens] (OTB of verl).

    The optimal token baseline: at each position t, the mean of the returns-to-go G_t over the group's episodes that
    reach t, weighted by the variance of their gradients so far. Positions count an episode's sampled tokens, so that
    this includes verl's multi-turn form. With ``zero_tail``, positions that only the longest episode of a group reaches
    have the baseline 0; otherwise, their own return, so that they do not train. Advantages are 0 in a group whose
    returns do not differ.
    """
    order = episodes.time_order
    owner, norm = episodes.token_episode[order], require(episodes.score_norm, Input.SCORE_NORM)
    returns = token_returns(episodes, episodes.token_rewards(), 1.0)[order]
    lengths = segment_sizes(owner, episodes.returns.numel())
    position = torch.arange(owner.numel()) - (lengths.cumsum(0) - lengths)[owner]
    sums = norm[order].double().cumsum(0)
    start = torch.cat([sums.new_zeros(1), sums])[(lengths.cumsum(0) - lengths)[owner]]
    weight = sums - start
    group = episodes.group[owner]
    place = group * (int(lengths.max()) + 1) + position
    places = int(place.max()) + 1
    total = segment_sum(weight, place, places) + MIN_PATH_VARIANCE
    baseline = (segment_sum(weight * returns, place, places) / total)[place]
    alone = segment_sizes(place, places)[place] == 1
    baseline = torch.where(alone, torch.zeros_like(returns) if zero_tail else returns, baseline)
    trains = differs(episodes.returns, episodes.group, episodes.groups)[group]
    advantage = torch.empty_like(returns)
    advantage[order] = torch.where(trains, returns - baseline, 0.0)
    return advantage


@compares_group
def gigpo(
    episodes: EpisodeBatch, *, omega: NotNegative = 1.0, gamma: Discount = 0.95, normalize: bool = True
) -> torch.Tensor:
    """A = A_episode + omega A_step: [tokens] (GiGPO, arXiv 2505.10978, section 4).

    A_episode is the advantage of `grpo`. A_step compares the discounted return G_k = s_k + gamma G_{k+1} of a turn with
    those of all turns of its group that were taken in the same state: G_k minus their mean, divided by their standard
    deviation. A_step is 0 for a state that occurs once. Without ``normalize``, deviations are not divided by.
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
    the last turn of episodes with a return greater than ``above``. A state without a path has the maximum length plus
    one. A_step compares turns that were taken in the same state, as in `gigpo`: [tokens].

    This follows the authors' code (GraphGPO, on verl-agent), except that the end of each failed episode is a separate
    state here, even if another episode has the same observation.
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
    ends = len(set(states)) + max(states) + 1  # larger numbers are not states
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
    """Enumerate the sequences of the last h + 1 states at each turn, for h = 0..depth: int64 [turns] each.

    Equal sequences have equal indices; turns with fewer states have -1.
    """
    found, number = [episodes.turn_state], turn_numbers(episodes)
    for h in range(1, depth + 1):
        pairs = torch.stack([found[-1], episodes.turn_state.roll(h)], dim=1)
        pairs[number < h] = -1
        found.append(torch.unique(pairs, dim=0, return_inverse=True)[1])
        found[-1] = torch.where(number < h, -1, found[-1])
    return found


def turn_numbers(episodes: EpisodeBatch) -> torch.Tensor:
    """Compute the index of each turn in its episode, from 0: int64 [turns]."""
    index = torch.arange(episodes.turn_episode.numel(), device=episodes.turn_episode.device)
    sizes = torch.bincount(episodes.turn_episode, minlength=episodes.returns.numel())
    return index - (sizes.cumsum(0) - sizes)[episodes.turn_episode]


def _compare(returns: torch.Tensor, segment: torch.Tensor, normalize: bool, *, unbiased: bool = True) -> torch.Tensor:
    """Compare returns with the other returns of their segment: [turns]."""
    count = int(segment.max()) + 1
    if normalize:
        return standardize(returns, segment, count, unbiased=unbiased)
    return subtract_mean(returns, segment, count)
