"""Scoring: how the return of a finished episode is computed from what happened."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.task import Task
from agentrl.trajectory import Trajectory

ROUNDING = 1e-9
"""Rewards that differ by less than this share of the largest of them are equal but for rounding."""

LEAST_DIFFERENCE = 1e-12
"""Rewards that differ by less than this are equal, too: what rounding leaves of sums that cancel."""


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Whether some rewards are further from the mean of all than rounding explains.

    >>> rewards_differ([0.3, 0.1 + 0.2]), rewards_differ([0.7, 0.7, 0.7]), rewards_differ([0.0, 1.0])
    (False, False, True)
    """
    if not rewards:
        return False
    mean = math.fsum(reward / len(rewards) for reward in rewards)
    bound = LEAST_DIFFERENCE + ROUNDING * max(map(abs, rewards))
    return any(abs(reward - mean) > bound for reward in rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A scorer's verdict."""

    reward: float | None
    """``None``: nothing can be said, the episode does not train."""
    components: Mapping[str, float] = field(default_factory=dict)


class Scorer(ABC):
    """Scores finished episodes. Exceptions become `EnvironmentFailure`; NaN is refused by the runtime."""

    @abstractmethod
    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """The score of one episode; must not change the trajectory."""


class EnvironmentReward(Scorer):
    """The sum of the rewards that the environment gave: the default."""

    async def score(self, trajectory: Trajectory, task: Task) -> Score:
        """Sum of the turns' rewards."""
        return Score(reward=sum(turn.reward for turn in trajectory.turns))
