"""Selection of a step's groups, and of their episodes, before advantages are estimated.

function               source                    keeps
---------------------  ------------------------  ---------------------------------------------------------------
`in_band`              PRIME, ARES               groups whose share of solved episodes is in a range
`top_p_groups`         RAGEN                     groups with the largest spreads, up to a share of all spreads
`resample_on_correct`  rStar2-Agent              some episodes of a group: correct ones with the smallest penalties

The spread of a group (`group_spreads`) is measured on the quantities that the estimator compares (`Compared`): for
example, not on total returns if it compares reward components or the rewards of turns.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch

from agentrl.algorithms.group_differences import uses_own_advantages
from agentrl.algorithms.segments import segment_sum, subtract_mean
from agentrl.algorithms.traits import Input, needed_inputs
from agentrl.algorithms.types import EpisodeBatch, Estimate
from agentrl.reward import ROUNDING

Scale: TypeAlias = Literal["linear", "softmax"]
"""Weights of groups in `top_p_groups`."""


class Compared(enum.StrEnum):
    """Rewards by which an estimator distinguishes episodes."""

    RETURNS = "returns"
    COMPONENTS = "components"
    """Individual components of the reward."""
    TURNS = "turns"
    """Rewards of turns with the same number, where the last turns count as equal."""


def compared_by(
    estimator: Callable[..., object], estimate: Callable[[EpisodeBatch], torch.Tensor | Estimate]
) -> Compared:
    """Determine the rewards that an estimator compares; `estimate` is the estimator with its options.

    An estimator compares turns if it distinguishes two episodes with equal returns but rewards at different turns.
    """
    if Input.COMPONENTS in needed_inputs(estimator):
        return Compared.COMPONENTS
    if not uses_own_advantages(estimator):
        return Compared.TURNS
    found = estimate(
        EpisodeBatch(
            returns=torch.ones(2, dtype=torch.float64),
            group=torch.zeros(2, dtype=torch.int64),
            turn_reward=torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64),
            turn_episode=torch.tensor([0, 0, 1, 1]),
            turn_state=torch.tensor([0, 1, 0, 1]),
            token_turn=torch.arange(4),
            greedy_return=torch.ones(1, dtype=torch.float64),
        )
    )
    advantage = found.advantage if isinstance(found, Estimate) else found
    return Compared.TURNS if bool((advantage.abs() > ROUNDING).any()) else Compared.RETURNS


def group_spreads(
    compared: Compared, episodes: EpisodeBatch, *, weights: Mapping[str, float] | None = None
) -> torch.Tensor:
    """Compute the spread of the episodes of each group: float64 [groups].

    It is the (unbiased) standard deviation of the returns, or the root of the summed variances of all components or
    turns; 0 if they differ by rounding only. `weights` are factors of components, 1 by default.
    """
    match compared:
        case Compared.RETURNS:
            columns = [episodes.returns]
        case Compared.COMPONENTS:
            factors = weights or {}
            columns = [values.nan_to_num() * factors.get(name, 1.0) for name, values in episodes.components.items()]
        case Compared.TURNS:
            columns = _turn_columns(episodes)
    variance = torch.zeros(episodes.groups, dtype=torch.float64)
    size = torch.bincount(episodes.group, minlength=episodes.groups)
    for values in columns:
        centred = subtract_mean(values.double(), episodes.group, episodes.groups)
        variance += segment_sum(centred.square(), episodes.group, episodes.groups) / (size - 1).clamp(min=1)
    return variance.sqrt()


def _turn_columns(episodes: EpisodeBatch) -> list[torch.Tensor]:
    """Return the rewards of turns by number: [episodes] each; the last turns are one column."""
    count, turns = episodes.returns.numel(), episodes.turn_episode
    sizes = torch.bincount(turns, minlength=count)
    number = torch.arange(turns.numel()) - (sizes.cumsum(0) - sizes)[turns]
    width = int(sizes.max()) + 1
    rewards = episodes.returns.new_zeros(count, width)
    rewards[turns, torch.where(number == sizes[turns] - 1, width - 1, number)] = episodes.turn_reward
    return list(rewards.unbind(1))


def in_band(accuracy: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Mark the groups whose accuracy, the mean over their episodes, is in [low, high]: bool [groups].

    PRIME (arXiv 2502.01456) keeps 0.2 to 0.8, ARES (arXiv 2510.08457) 0.01 to 0.99.
    """
    return (accuracy >= low) & (accuracy <= high)


def top_p_groups(spread: torch.Tensor, p: float, *, scale: Scale = "linear") -> torch.Tensor:
    """Mark the groups with the largest spreads, which together have a share `p` of all: bool [groups].

    RAGEN's filter (arXiv 2504.20073). Groups with spread 0 are left out first. With scale `linear` the shares are those
    of the spreads, with `softmax` those of their exponentials. The group that reaches `p` is included. If all groups
    have spread 0, none is marked.
    """
    differing = spread > 0
    weight = spread if scale == "linear" else (spread - spread.max()).exp()
    weight = torch.where(differing, weight, 0.0)
    order = torch.argsort(weight, descending=True, stable=True)
    before = weight[order].cumsum(0) - weight[order]
    chosen = torch.zeros_like(differing)
    chosen[order] = before < p * weight.sum() * (1 - ROUNDING)
    return chosen & differing


def resample_on_correct(
    right: Sequence[bool], penalty: Sequence[float], *, keep: int, least_right: int = 2, least_wrong: int = 2
) -> list[int]:
    """Choose `keep` episodes of a group in proportion to its correct and incorrect ones; return their sorted indices.

    rStar2-Agent (arXiv 2508.20722): the correct episodes with the smallest penalties, such as the share of failed tool
    calls, and the first incorrect episodes. At least `least_right` and `least_wrong` episodes of each kind are kept if
    the group has as many. A group of at most `keep` episodes, or one with too few of both kinds, is kept whole.

    >>> resample_on_correct([True, True, True, False], [0.5, 0.0, 0.2, 0.0], keep=2, least_right=1, least_wrong=1)
    [1, 3]
    """
    count = len(right)
    if count <= keep:
        return list(range(count))
    correct = sorted((i for i in range(count) if right[i]), key=lambda i: penalty[i])
    failed = [i for i in range(count) if not right[i]]
    wrong_kept, right_kept = (round(len(own) * keep / count) for own in (failed, correct))
    if wrong_kept < least_wrong and right_kept < least_right:
        return list(range(count))
    if wrong_kept <= (least := min(least_wrong, len(failed))):
        wrong_kept, right_kept = least, keep - least
    if right_kept <= (least := min(least_right, len(correct))):
        right_kept, wrong_kept = least, keep - least
    chosen = correct[:right_kept] + failed[: keep - min(right_kept, len(correct))]
    return sorted(chosen)
