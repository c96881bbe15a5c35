"""What was played beside a step's groups, for the trainer: greedy rollouts, and the episodes of an expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from agentrl.errors import TrainingError
from agentrl.training.gradient_pass import TokenValues
from agentrl.training.rewards import RewardShaping
from agentrl.training.selection import Selection
from agentrl.training.step_batch import StepBatch
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Guides:
    """Episodes that are no samples of the policy."""

    greedy: Mapping[str, Trajectory] = field(default_factory=dict)
    """A greedy rollout of each group's task, by group id: for ``remax``. It does not train."""
    experts: Sequence[Trajectory] = ()
    """More members of the groups: their forced tokens train, for ``luffy``."""

    @property
    def expert_ids(self) -> frozenset[str]:
        """The ids of the experts' trajectories."""
        return frozenset(trajectory.id for trajectory in self.experts)


def own_selection(selection: Selection, guides: Guides) -> Selection:
    """A selection without the experts' episodes, which say nothing about the policy."""
    expert = guides.expert_ids
    own = tuple(trajectory for trajectory in selection.trajectories if trajectory.id not in expert)
    return dataclasses.replace(selection, trajectories=own)


def with_greedy_returns(
    batch: StepBatch, trajectories: Sequence[Trajectory], greedy: Mapping[str, Trajectory], shaping: RewardShaping
) -> StepBatch:
    """The batch with the return of each group's greedy rollout, shaped like the others'.

    Args:
        batch: Of a step.
        trajectories: Which it was made of.
        greedy: By group id; none are needed where the estimator reads none.
        shaping: Of the run; KL in the reward is not in the greedy return.

    Raises:
        TrainingError: a group has no greedy rollout with a reward, and others have.
    """
    if not greedy:
        return batch
    groups = dict.fromkeys(trajectory.group_id for trajectory in trajectories)
    if lacking := [group for group in groups if group not in greedy or greedy[group].reward is None]:
        raise TrainingError(
            f"group {lacking[0]} cannot be compared with a greedy rollout",
            got=f"{len(lacking)} of {len(groups)} groups without one, or with one that has no reward",
            expected="a greedy rollout with a reward for every group",
        )
    returns = shaping([greedy[group] for group in groups]).returns
    return dataclasses.replace(batch, episodes=dataclasses.replace(batch.episodes, greedy_return=returns))


def with_teacher_reward(batch: StepBatch, shaping: RewardShaping, teacher_logp: torch.Tensor | None) -> StepBatch:
    """The batch with the divergence from a teacher, float32 [tokens], in its rewards, if the algorithm wants that."""
    if shaping.distill is None or teacher_logp is None:
        return batch
    penalty = shaping.distill.penalty(batch.behaviour_logp, teacher_logp.cpu())
    return dataclasses.replace(batch, episodes=batch.episodes.with_token_reward(penalty))


def with_guides(values: TokenValues, batch: StepBatch, teacher_logp: torch.Tensor | None) -> TokenValues:
    """What losses read of a teacher, float32 [tokens], and of experts."""
    expert = None if batch.expert is None else batch.expert.to(values.advantage.device)
    return dataclasses.replace(values, teacher_logp=teacher_logp, expert=expert)
