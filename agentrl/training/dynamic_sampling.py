"""Dynamic sampling: selection of the groups in which the run's estimator finds differences.

It uses the rewards before ``algorithm.shaping``: a length penalty alone does not make a group worth training on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

import torch

from agentrl.algorithms.types import EpisodeBatch
from agentrl.config.config import AlgorithmConfig
from agentrl.training.batch import NothingToTrain, StepExtras, episode_batch, select, trained_mask
from agentrl.training.gradients import Objective
from agentrl.training.rewards import RewardShaping
from agentrl.training.roles import role_extras, role_members
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLearner:
    """GroupLearner of a group: the policy, or one of several adapters."""

    algorithm: AlgorithmConfig
    roles: Set[str] | None = None
    """Roles whose tokens train it; ``None`` means all."""


class DynamicSampling:
    """Test if at least one learner can learn from a group.

    Raises:
        ConfigError: an estimator does not take an option.
    """

    def __init__(self, learners: Iterable[GroupLearner]) -> None:
        self._objectives = [(Objective(learner.algorithm), learner.roles) for learner in learners]
        self._shaping = RewardShaping({}, max_tokens=1)

    def has_signal(self, trajectories: Sequence[Trajectory], extras: StepExtras | None = None) -> bool:
        """Return True if an estimator tells the episodes of a group apart; failed episodes are skipped.

        Raises:
            TrainingError: an estimator failed.
        """
        extras = role_extras(extras or StepExtras(), trajectories)
        return any(
            self._objective_has_signal(objective, roles, trajectories, extras) for objective, roles in self._objectives
        )

    def _objective_has_signal(
        self, objective: Objective, roles: Set[str] | None, trajectories: Sequence[Trajectory], extras: StepExtras
    ) -> bool:
        members = [*role_members(trajectories, roles), *extras.experts]
        try:
            kept = select(members, compare_groups=objective.compares_groups).trajectories
        except NothingToTrain:
            return False
        return bool(objective.differing_groups(self._episodes(kept, extras)).any())

    def _episodes(self, trajectories: Sequence[Trajectory], extras: StepExtras) -> EpisodeBatch:
        token_turn, first = list[torch.Tensor](), 0
        for trajectory in trajectories:
            token_turn.append(first + _turn_of_tokens(trajectory, by_expert=trajectory.id in extras.expert_ids))
            first += len(trajectory.turns)
        batch = episode_batch(trajectories, self._shaping(trajectories), torch.cat(token_turn))
        groups = dict.fromkeys(trajectory.group_id for trajectory in trajectories)
        greedy = [extras.greedy[group] for group in groups if group in extras.greedy]
        if len(greedy) < len(groups):
            return batch
        return replace(batch, greedy_return=self._shaping(greedy).returns)


def _turn_of_tokens(trajectory: Trajectory, *, by_expert: bool) -> torch.Tensor:
    """Return the turn, counted within the episode, of each token that trains: int64 [tokens]."""
    order = {id(turn): number for number, turn in enumerate(trajectory.turns)}
    counts = torch.zeros(len(order), dtype=torch.int64)
    for sequence in trajectory.sequences:
        mask = trained_mask(sequence, by_expert=by_expert)
        for turn in sequence.turns:
            counts[order[id(turn)]] = int(mask[turn.start : turn.end].sum())
    return torch.arange(len(order)).repeat_interleave(counts)
