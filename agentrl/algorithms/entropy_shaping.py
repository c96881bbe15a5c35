"""Entropy shaping: a reward for the number of uncertain passages of an episode, by the difficulty of its task.

ARES, arXiv 2510.08457. A token is followed by an uncertain passage if the mean entropy of the next tokens is above a
threshold. Episodes of easy tasks should have few such tokens, of hard tasks many, and of medium tasks an average
number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from agentrl.algorithms.options import NotNegative, Share
from agentrl.algorithms.segments import segment_mean, segment_sum

WRONG_EPISODE_WEIGHTS = (0.6, 0.8, 1.0)
"""Weights of the reward of wrong episodes, for easy, medium and hard tasks; this and the following as in the authors'
code."""
MARGINS = (0.15, 0.25, 0.35)
"""Tolerated relative deviations from the target; the tolerance is at least 1 token."""
BENDS = (2.0, 3.0, 4.0)
"""Excesses up to which a penalty is quadratic, and above which it is linear."""
WIDTHS = (2.0, 2.5, 3.0)
"""Widths of the sigmoid of a reward."""
CAPS = (1.0, 1.0, 1.2)
"""Maxima of rewards and penalties, times the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertainTokens:
    """Tokens before uncertain passages."""

    counts: torch.Tensor
    """Number of such tokens: float64 [episodes]."""
    threshold: float
    """Mean entropy above which a passage is uncertain, in nats; infinite if all turns are too short."""


class EntropyShaping:
    """Add a reward for the number of tokens before uncertain passages, by the difficulty of the task.

    ARES, arXiv 2510.08457. A task is easy if at least 2/3 of its group's episodes are solved, hard if fewer than 1/3
    are. The target is the mean number in the step's groups of the same difficulty. Correct episodes lose reward if
    they have too many such tokens (easy), too many or too few (medium), or too few (hard); correct episodes of hard
    tasks, and incorrect episodes of all tasks, gain reward for many.

    Args:
        window: Number of tokens in a passage.
        percentile: Share of an episode's passages that are below its threshold; the median over episodes is used.
        weight: Maximum of the reward (1.2 times as much for hard tasks).

    Raises:
        ConfigError: an option is out of range.
    """

    name = "ares"

    def __init__(
        self, *, window: Annotated[int, Field(ge=1)] = 4, percentile: Share = 0.95, weight: NotNegative = 0.5
    ) -> None:
        self._window, self._percentile, self._weight = window, percentile, weight

    def count(self, entropy: torch.Tensor, turn: torch.Tensor, episode: torch.Tensor, episodes: int) -> UncertainTokens:
        """Count the tokens before uncertain passages, which are within a turn.

        Args:
            entropy: Entropy at each token, in nats: [tokens].
            turn: Turn of each token, whose tokens are consecutive: int64 [tokens].
            episode: Episode of each token: int64 [tokens].
            episodes: Number of episodes.
        """
        counts = torch.zeros(episodes, dtype=torch.float64)
        if entropy.numel() <= self._window:
            return UncertainTokens(counts=counts, threshold=float("inf"))
        passages = entropy.double().unfold(0, self._window, 1).mean(-1)[1:]
        starts = episode[: -self._window]
        whole = turn[: -self._window] == turn[self._window :]
        passages, owner = passages[whole], starts[whole]
        sizes = torch.bincount(owner, minlength=episodes).tolist()
        of_episodes = torch.split(passages[owner.argsort(stable=True)], sizes)
        own = [part.quantile(self._percentile) for part in of_episodes if part.numel()]
        if not own:
            return UncertainTokens(counts=counts, threshold=float("inf"))
        threshold = torch.stack(own).quantile(0.5)
        counts = segment_sum((passages >= threshold).double(), owner, episodes)
        return UncertainTokens(counts=counts, threshold=float(threshold))

    def rewards(self, counts: torch.Tensor, right: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        """Compute the additional rewards: float64 [episodes].

        Args:
            counts: Number of tokens before uncertain passages: [episodes].
            right: Mask of solved episodes: bool [episodes].
            group: Group of each episode: int64 [episodes], from 0.
        """
        groups = int(group.max()) + 1
        accuracy = segment_mean(right.double(), group, groups)
        hardness = (accuracy < 2 / 3 - 1e-9).long() + (accuracy < 1 / 3 - 1e-9).long()
        targets = segment_mean(segment_mean(counts.double(), group, groups), hardness, 3).round()
        level = hardness[group]
        target = targets[level]
        margin_share, bend, width, cap, wrong_weight = (
            torch.tensor(table, dtype=torch.float64)[level]
            for table in (MARGINS, BENDS, WIDTHS, CAPS, WRONG_EPISODE_WEIGHTS)
        )
        cap = cap * self._weight
        margin = (margin_share * target.clamp(min=1)).clamp(min=1)
        excess = counts - target
        above, below = (excess - margin).clamp(min=0), (-excess - margin).clamp(min=0)
        hard = level == 2
        strayed = torch.where(hard, below, torch.where(level == 1, above + below, above))
        penalty = _huber(strayed, bend) / (margin + bend) * torch.where(hard, 0.5, 1.0)
        loses = -torch.minimum(cap, penalty * cap)
        gains = ((excess + margin) / width).sigmoid() * cap
        found = torch.where(hard & (excess >= -margin), gains, loses)
        return torch.where(right, found, (above / width).sigmoid() * cap * wrong_weight)


def _huber(values: torch.Tensor, bend: torch.Tensor) -> torch.Tensor:
    """Compute x^2 / (2 bend) up to `bend`, and x - bend / 2 above, for x >= 0."""
    return torch.where(values <= bend, values.square() / (2 * bend), values - bend / 2)
