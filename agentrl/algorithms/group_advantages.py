"""Advantages of an episode against the other members of its group; every token of the episode gets the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from agentrl.algorithms.episodes import EpisodeBatch
from agentrl.algorithms.marks import Input, compares_group, needs
from agentrl.algorithms.segments import (
    STD_EPSILON,
    centred,
    deviation,
    segment_mean,
    segment_sizes,
    segment_std,
    segment_sum,
    standardize,
    whiten,
)
from agentrl.errors import TrainingError
from agentrl.reward import LEAST_DIFFERENCE


@compares_group
def grpo(episodes: EpisodeBatch) -> torch.Tensor:
    """A = (R - mean_g) / (std_g + 1e-6): [tokens] (DeepSeekMath, arXiv 2402.03300, section 4.1)."""
    return episodes.to_tokens(standardize(episodes.returns, episodes.group, episodes.groups))


@compares_group
def dr_grpo(episodes: EpisodeBatch) -> torch.Tensor:
    """A = R - mean_g: [tokens]; meant for aggregation seq-mean-token-sum-norm (Dr. GRPO, arXiv 2503.20783)."""
    return episodes.to_tokens(centred_returns(episodes))


@compares_group
def rloo(episodes: EpisodeBatch) -> torch.Tensor:
    """A = R - mean of the others = n / (n - 1) (R - mean_g): [tokens] (RLOO, arXiv 2402.14740)."""
    return episodes.to_tokens(against_others(episodes.returns, episodes))


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
    """A = alpha (R - mean_g), alpha = episodes / episodes whose R is not mean_g: [tokens] (GPG, arXiv 2504.02546)."""
    advantage = centred_returns(episodes)
    teaching = int((advantage != 0).sum())
    return episodes.to_tokens(advantage * (advantage.numel() / max(teaching, 1)))


@compares_group
def maxrl(episodes: EpisodeBatch) -> torch.Tensor:
    """A = (R - mean_g) / mean_g where mean_g > 0, else 0: [tokens] (MaxRL, arXiv 2602.02710).

    Raises:
        TrainingError: a return is negative.
    """
    if bool((episodes.returns < -LEAST_DIFFERENCE).any()):
        raise TrainingError(
            "maxrl divides by the mean return of a group",
            got=f"a return of {float(episodes.returns.min()):g}",
            expected="returns of 0 or more, after shaping",
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

    Args:
        episodes: With reward components C_c.
        weights: w_c by name; 1 for those that are not named. One of 0 leaves a component out.

    Raises:
        TrainingError: there are no components, or a weight is given to one that does not exist.
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
        "gdpo normalises every component of the reward",
        got=f"episodes without {partial[0]!r}" if partial else f"the components {', '.join(given) or '(none)'}",
        expected=f"one named {unknown[0]!r}" if unknown else "the same components in every episode, one or more",
        hint="name several reward functions in agent.reward, or let the environment give reward_components",
    )


def centred_returns(episodes: EpisodeBatch) -> torch.Tensor:
    """R - mean_g: [episodes]."""
    return centred(episodes.returns, episodes.group, episodes.groups)


def against_others(values: torch.Tensor, episodes: EpisodeBatch) -> torch.Tensor:
    """Values minus the mean of the group's other members: [episodes]; 0 for a group of one."""
    size = segment_sizes(episodes.group, episodes.groups)[episodes.group]
    return centred(values, episodes.group, episodes.groups) * size / (size - 1).clamp(min=1)
