"""The models of a step that only score and never learn: the reference that KL is measured from, and a teacher.

- What was played beside a step's groups, for the trainer: greedy rollouts, and the episodes of an expert.
- What a training step is given.
- How far a step's tokens are from a reference or a teacher, as a part of their rewards.
- Rounds of training: the reference becomes the policy of now every so many steps, as self-play asks for.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from agentrl.config.config import AlgorithmConfig, TrainerConfig
from agentrl.engine import TopTokens
from agentrl.errors import ConfigError, TrainingError, UsageError
from agentrl.models.lora import base_is_reference, has_adapters
from agentrl.training.batch import Selection, StepBatch, trained_mask
from agentrl.training.forward.logprobs import TeacherLogprobs
from agentrl.training.forward.runner import ModelRunner
from agentrl.training.rewards import RewardShaping
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


def served_teacher_logprobs(
    batch: StepBatch, trajectories: Sequence[Trajectory], guides: Guides, device: torch.device
) -> TeacherLogprobs:
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
        return TeacherLogprobs(logp=logp)
    tops = [guides.teacher_top[trajectory.id][number] for trajectory, number in rows]
    ids, top_logp = of_tokens([top.ids for top in tops]), of_tokens([top.logp for top in tops])
    return TeacherLogprobs(logp=logp, top_ids=ids, top_logp=top_logp)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """The episodes of a step, and how they were sampled."""

    trajectories: Sequence[Trajectory]
    """Whole groups, finished; failed and unscored ones may be among them."""
    temperature: float
    pad_id: int
    """Any id of the vocabulary."""
    guides: Guides = field(default_factory=Guides)
    """What was played beside the groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenOpinions:
    """What they say of a step's sampled tokens, on the policy's device."""

    reference: torch.Tensor | None
    """Log-probabilities: float32 [tokens]."""
    teacher: TeacherLogprobs | None


class FrozenModels:
    """The reference and the teacher of a trainer, as far as its algorithm has them.

    Args:
        policy: The model that learns.
        algorithm: Says whether there is a teacher, and where.
        config: Sizes of their passes.
        uses_reference: Whether anything compares with a reference.
        reference: When left out, the policy without its adapters where these are all that is trained, and else a
            frozen copy of the policy as it is now.
        teacher: Frozen; none where it has servers.

    Raises:
        UsageError: the algorithm has a teacher without servers, and none is here.
    """

    def __init__(
        self,
        policy: ModelRunner,
        algorithm: AlgorithmConfig,
        config: TrainerConfig,
        *,
        uses_reference: bool,
        reference: PreTrainedModel | None,
        teacher: PreTrainedModel | None,
    ) -> None:
        if algorithm.teacher is not None and not algorithm.teacher.servers and teacher is None:
            raise UsageError("algorithm.teacher is a model", got="no teacher", expected="Trainer(teacher=…)")
        self._device = policy.model.device
        self._has_teacher = algorithm.teacher is not None
        self._top_k = None if algorithm.teacher is None else algorithm.teacher.top_k
        self.reference = _reference(policy, reference, config) if uses_reference else None
        self._teacher = None if teacher is None else policy.beside(teacher, config)

    def replay_routes(self, policy: ModelRunner) -> None:
        """Let the reference route as the engine did, and as the policy does already."""
        if self.reference is None:
            return
        if self.reference.model is policy.model:
            self.reference.passes = policy.passes
        else:
            self.reference.replay_routes()

    def opinions(self, batch: StepBatch, trajectories: Sequence[Trajectory], given: StepInput) -> FrozenOpinions:
        """Score a step's tokens.

        Args:
            batch: Of the step.
            trajectories: Which it was made of.
            given: Has what a teacher behind servers has said of them.

        Raises:
            TrainingError: a teacher behind servers was not asked about an episode.
        """
        reference = teacher = None
        if self.reference is not None:
            scores = self.reference.logprobs(batch.sequences, temperature=given.temperature, pad_id=given.pad_id)
            reference = scores.logp
        if self._has_teacher:
            teacher = self._taught(batch, trajectories, given)
        return FrozenOpinions(reference=reference, teacher=teacher)

    def _taught(self, batch: StepBatch, trajectories: Sequence[Trajectory], given: StepInput) -> TeacherLogprobs:
        if self._teacher is None:
            return served_teacher_logprobs(batch, trajectories, given.guides, self._device)
        return self._teacher.top_logprobs(
            batch.sequences, top_k=self._top_k, temperature=given.temperature, pad_id=given.pad_id
        )


def _reference(policy: ModelRunner, reference: PreTrainedModel | None, config: TrainerConfig) -> ModelRunner:
    if reference is not None:
        return policy.beside(reference, config, base_only=reference is policy.model)
    if base_is_reference(policy.model):
        return ModelRunner(policy.model, policy.passes, base_only=True)
    return ModelRunner(copy.deepcopy(policy.model).requires_grad_(False).eval(), policy.passes)


def with_reward_kl(batch: StepBatch, shaping: RewardShaping, reference_logp: torch.Tensor | None) -> StepBatch:
    """The batch with KL to a reference, float32 [tokens], in its rewards, if the algorithm wants that; its weight then
    moves towards the next step's.
    """
    kl = shaping.kl
    if kl is None or reference_logp is None:
        return batch
    reference = reference_logp.cpu()
    episodes = batch.episodes.with_token_reward(kl.penalty(batch.behaviour_logp, reference))
    kl.adapt(float(kl.divergence(batch.behaviour_logp, reference).mean()), episodes.returns.numel())
    return dataclasses.replace(batch, episodes=episodes)


def with_teacher_reward(batch: StepBatch, shaping: RewardShaping, teacher: TeacherLogprobs | None) -> StepBatch:
    """The batch with the divergence from a teacher in its rewards, if the algorithm wants that; an expert's tokens have
    none.
    """
    if shaping.distill is None or teacher is None:
        return batch
    penalty = shaping.distill.penalty(batch.behaviour_logp, teacher.logp.cpu())
    if batch.expert is not None:
        penalty = penalty.masked_fill(batch.expert, 0.0)
    return dataclasses.replace(batch, episodes=batch.episodes.with_token_reward(penalty))


class ReferenceRefresh:
    """A reference that is renewed; a part of the trainer's state, because no file of the run holds it otherwise.

    Args:
        policy: What the reference becomes.
        reference: Another model of the same kind, in the same shards.
        every: Steps of a round.
    """

    def __init__(self, policy: PreTrainedModel, reference: PreTrainedModel, every: int) -> None:
        self._policy, self._reference, self._every = policy, reference, every

    def begin_step(self, steps: int) -> dict[str, float]:
        """Renew the reference where a round begins; says which round it is, from 1, under the metric's name.

        Args:
            steps: That the policy has taken so far.
        """
        if steps and steps % self._every == 0:
            with torch.no_grad():
                for own, new in zip(self._reference.parameters(), self._policy.parameters(), strict=True):
                    own.copy_(new)
        return {"train/reference_round": float(steps // self._every + 1)}

    def named_state(self) -> dict[str, torch.Tensor]:
        """The weights of the reference by name."""
        return {name: parameter.detach() for name, parameter in self._reference.named_parameters()}

    def room_for(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors into which a state of these names can be read.

        Raises:
            UsageError: it is not that of this reference.
        """
        own = self.named_state()
        if set(names) != set(own):
            raise UsageError(
                "the checkpoint does not hold the reference of a run in rounds",
                got=f"{len(names)} tensors",
                expected=f"{len(own)}",
                hint="set algorithm.reference.refresh_every as the run had it",
            )
        return {name: torch.empty_like(own[name]) for name in names}

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `room_for` made, filled."""
        with torch.no_grad():
            for name, parameter in self._reference.named_parameters():
                parameter.copy_(state[name])


def make_rounds(
    algorithm: AlgorithmConfig, policy: PreTrainedModel, reference: ModelRunner | None
) -> ReferenceRefresh | None:
    """What renews a trainer's reference, where its config wants that.

    Raises:
        ConfigError: there is no reference, or it is the policy without its adapters.
    """
    if not _every(algorithm):
        return None
    check_rounds(algorithm, has_reference=reference is not None, has_adapters=has_adapters(policy))
    assert reference is not None
    return ReferenceRefresh(policy, reference.model, _every(algorithm))


def check_rounds(algorithm: AlgorithmConfig, *, has_reference: bool, has_adapters: bool) -> None:
    """Check that a reference that is to be renewed is there, and can be.

    Raises:
        ConfigError: it is not.
    """
    if not _every(algorithm):
        return
    if not has_reference:
        raise ConfigError(
            "algorithm.reference.refresh_every is ignored: nothing is compared with a reference",
            got=f"algorithm.loss {algorithm.loss}, no algorithm.kl_coef and no shaping kl",
            expected="algorithm.loss=sppo, or a KL to the reference",
        )
    if has_adapters:
        raise ConfigError(
            "the reference of adapters is the model without them, which stays as it is",
            got=f"model.lora with algorithm.reference.refresh_every {_every(algorithm)}",
            expected="algorithm.reference.refresh_every=0, or no model.lora",
        )


def _every(algorithm: AlgorithmConfig) -> int:
    return 0 if algorithm.reference is None else algorithm.reference.refresh_every
