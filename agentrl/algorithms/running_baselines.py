"""Estimators with a running baseline per role, task type or task, which persists between steps; groups of one suffice.

A tracker maintains the statistics of each baseline. An episode's baseline is read before its own return updates it, so
it does not depend on the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol, TypeAlias

import torch
from pydantic import Field

from agentrl.algorithms.segments import deviation, whiten
from agentrl.algorithms.traits import Input, needs, tracks
from agentrl.algorithms.types import EpisodeBatch, require

Unit: TypeAlias = Literal["role", "kind", "task"]
"""Owner of a baseline: a role in an environment, a role and type of task, or a role and task."""
Decay: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


class BaselineTracker(Protocol):
    """Rule for the statistics from which a baseline is computed."""

    unit: Unit
    start: Sequence[float]
    """Initial statistics."""

    def baseline(self, numbers: Sequence[float]) -> float:
        """Compute the baseline."""

    def update(self, numbers: Sequence[float], reward: float) -> Sequence[float]:
        """Return the statistics updated with an episode's return."""


class RoleMean:
    """Moving average of the returns of a role, or of a role and type of task, from 0."""

    start = (0.0,)

    def __init__(self, *, decay: Decay = 0.95, per: Literal["role", "kind"] = "role") -> None:
        self.unit: Unit = per
        self._decay = decay

    def baseline(self, numbers: Sequence[float]) -> float:
        """Return the average."""
        return numbers[0]

    def update(self, numbers: Sequence[float], reward: float) -> Sequence[float]:
        """Return the updated average."""
        return (self._decay * numbers[0] + (1 - self._decay) * reward,)


class TaskSuccess:
    """Discounted counts of a task's successes and failures, from 1/2 each (a Beta distribution)."""

    unit: Unit = "task"
    start = (0.5, 0.5)

    def __init__(self, *, rho: Decay = 0.875) -> None:
        self._rho = rho

    def baseline(self, numbers: Sequence[float]) -> float:
        """Return the mean of the distribution."""
        return numbers[0] / (numbers[0] + numbers[1])

    def update(self, numbers: Sequence[float], reward: float) -> Sequence[float]:
        """Discount the counts, and add an episode."""
        return self._rho * numbers[0] + reward, self._rho * numbers[1] + 1 - reward


@tracks(RoleMean)
@needs(Input.BASELINE)
def rae(episodes: EpisodeBatch, *, decay: Decay = 0.95, per: Literal["role", "kind"] = "role") -> torch.Tensor:
    """A = R - b, b = decay b + (1 - decay) R over the earlier episodes of the role: [tokens] (arXiv 2506.24119).

    Role-conditioned advantage estimation of SPIRAL, for self-play. A group mean carries no information in a zero-sum
    game; b is the average return of the role. Every role of every environment has its own b, which starts at 0; with
    ``per: kind``, every role and type of task (`agentrl.task.Task.type`), for a role whose tasks differ in difficulty.
    """
    del decay, per  # the tracker's
    return episodes.to_tokens(_above_baseline(episodes))


@tracks(TaskSuccess)
@needs(Input.BASELINE)
def spo(episodes: EpisodeBatch, *, rho: Decay = 0.875) -> torch.Tensor:
    """A = R - a / (a + b), whitened over the episodes; a = rho a + R, b = rho b + 1 - R per task (arXiv 2509.13232).

    SPO, with a constant rho and rewards from 0 to 1: [tokens]. a and b start at 1/2. Meant for repeated tasks and
    groups of one. The authors also discount by the KL since the task's last episode, and draw tasks by their success;
    see curricula for the latter.
    """
    del rho  # the tracker's
    return episodes.to_tokens(whiten(_above_baseline(episodes)))


def _above_baseline(episodes: EpisodeBatch) -> torch.Tensor:
    """Subtract the baselines from the returns: [episodes]."""
    baseline = require(episodes.baseline, Input.BASELINE)
    return deviation(episodes.returns, baseline, episodes.group, episodes.groups)
