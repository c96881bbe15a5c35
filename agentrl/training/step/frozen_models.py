"""The models of a step that only score and never learn: the reference that KL is measured from, and a teacher."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from agentrl.config.schema import AlgorithmConfig, TrainerConfig
from agentrl.errors import UsageError
from agentrl.training.models.lora import base_is_reference
from agentrl.training.scoring.scorer import Scorer
from agentrl.training.scoring.top_tokens import TokenOpinions
from agentrl.training.step.batch import StepBatch
from agentrl.training.step.guides import told_by_teacher
from agentrl.training.step.input import StepInput
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenOpinions:
    """What they say of a step's sampled tokens, on the policy's device."""

    reference: torch.Tensor | None
    """Log-probabilities: float32 [tokens]."""
    teacher: TokenOpinions | None


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
        policy: Scorer,
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
        self._teacher = None if teacher is None else Scorer(teacher, policy.passes.of(teacher, config))

    def replay_routes(self, policy: Scorer) -> None:
        """Let the reference route as the engine did, and as the policy does already."""
        if self.reference is None:
            return
        own = self.reference.model is policy.model
        self.reference.passes = policy.passes if own else self.reference.passes.replaying(self.reference.model)

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
            scores = self.reference.scores(batch.sequences, temperature=given.temperature, pad_id=given.pad_id)
            reference = scores.logp
        if self._has_teacher:
            teacher = self._taught(batch, trajectories, given)
        return FrozenOpinions(reference=reference, teacher=teacher)

    def _taught(self, batch: StepBatch, trajectories: Sequence[Trajectory], given: StepInput) -> TokenOpinions:
        if self._teacher is None:
            return told_by_teacher(batch, trajectories, given.guides, self._device)
        return self._teacher.opinions(
            batch.sequences, top_k=self._top_k, temperature=given.temperature, pad_id=given.pad_id
        )


def _reference(policy: Scorer, reference: PreTrainedModel | None, config: TrainerConfig) -> Scorer:
    if reference is not None:
        return Scorer(reference, policy.passes.of(reference, config), base_only=reference is policy.model)
    if base_is_reference(policy.model):
        return Scorer(policy.model, policy.passes, base_only=True)
    return Scorer(copy.deepcopy(policy.model).requires_grad_(False).eval(), policy.passes)
