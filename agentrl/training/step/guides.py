"""What was played beside a step's groups, for the trainer: greedy rollouts, and the episodes of an expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from agentrl.errors import TrainingError
from agentrl.policy import TopTokens
from agentrl.training.scoring.top_tokens import TokenOpinions
from agentrl.training.step.batch import StepBatch, trained_mask
from agentrl.training.step.rewards import RewardShaping
from agentrl.training.step.selection import Selection
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Guides:
    """Episodes that are no samples of the policy."""

    greedy: Mapping[str, Trajectory] = field(default_factory=dict)
    """A greedy rollout of each group's task, by group id: for ``remax``. It does not train."""
    experts: Sequence[Trajectory] = ()
    """More members of the groups: their forced tokens train, for ``luffy``."""
    teacher_logp: Mapping[str, Sequence[npt.NDArray[np.float32]]] = field(default_factory=dict)
    """log p of a teacher behind servers, by trajectory id: float32 [T] for each sequence, NaN for its first token."""
    teacher_top: Mapping[str, Sequence[TopTokens]] = field(default_factory=dict)
    """What that teacher would have said instead, by trajectory id, for each sequence; where somebody asked."""

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


def told_by_teacher(
    batch: StepBatch, trajectories: Sequence[Trajectory], guides: Guides, device: torch.device
) -> TokenOpinions:
    """What a teacher behind servers has said of a batch's tokens.

    Args:
        batch: Of a step.
        trajectories: Which it was made of.
        guides: Of the step.
        device: Of the policy.

    Raises:
        TrainingError: it was not asked about one of them.
    """
    rows = [
        (trajectory, number)
        for trajectory in trajectories
        for number, sequence in enumerate(trajectory.sequences)
        if trained_mask(sequence, by_expert=trajectory.id in guides.expert_ids).any()
    ]
    if lacking := [trajectory.id for trajectory, _ in rows if trajectory.id not in guides.teacher_logp]:
        raise TrainingError("the teacher was not asked about an episode", got=f"{len(lacking)} such as {lacking[0]}")
    places = [scored.positions + 1 for scored in batch.sequences]

    def of_tokens(by_sequence: list[npt.NDArray[Any]]) -> torch.Tensor:
        found = [torch.from_numpy(own)[where] for own, where in zip(by_sequence, places, strict=True)]
        return torch.cat(found).to(device)

    logp = of_tokens([guides.teacher_logp[trajectory.id][number] for trajectory, number in rows])
    if not guides.teacher_top:
        return TokenOpinions(logp=logp)
    tops = [guides.teacher_top[trajectory.id][number] for trajectory, number in rows]
    ids, top_logp = of_tokens([top.ids for top in tops]), of_tokens([top.logp for top in tops])
    return TokenOpinions(logp=logp, top_ids=ids, top_logp=top_logp)
