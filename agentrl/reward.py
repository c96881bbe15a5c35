"""Scoring: how the return of a finished episode is computed from what happened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.task import Task
from agentrl.trajectory import Trajectory


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
