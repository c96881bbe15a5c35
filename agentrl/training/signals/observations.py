"""Cross-entropy of observations: the policy also learns to predict what its environment answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from agentrl.algorithms.types import Estimate
from agentrl.training.batch import StepBatch, trained_mask
from agentrl.training.forward.runner import ModelRunner, SumsByName
from agentrl.training.forward.sequences import ScoredSequence, scored_sequence
from agentrl.training.signals.base import SignalSetup, SignalUpdates, TokenSignal
from agentrl.trajectory import Source, TokenSequence


class ObservationLoss(TokenSignal):
    """Loss of ``algorithm.observation_coef``, in a pass of its own (Echo of prime-rl).

    The tokens are those of observations after the policy's first turn, without the template's and images, in sequences
    that train.
    """

    name = "observations"

    def __init__(self, policy: ModelRunner, coef: float) -> None:
        self._policy, self._coef = policy, coef

    @classmethod
    def build(cls, setup: SignalSetup) -> ObservationLoss | None:
        """Build the signal, if observations have a weight."""
        coef = setup.algorithm.observation_coef
        return cls(setup.policy, coef) if coef else None

    def train(self, batch: StepBatch, estimate: Estimate, *, policy_learns: bool) -> SignalUpdates | None:
        """Return the step's additions to the policy's gradients."""
        return _ObservationStep(self._policy, self._coef, batch) if policy_learns else None


class _ObservationStep:
    joins_policy = False

    def __init__(self, policy: ModelRunner, coef: float, batch: StepBatch) -> None:
        self._policy, self._coef, self._batch = policy, coef, batch
        self._sequences = _observed_sequences(batch)
        self._tally = SumsByName()

    def accumulate(self, part: list[int]) -> None:
        """Add the gradient of `coef` times the mean over the update's observation tokens to the policy's."""
        members = [i for i in part if self._sequences[i] is not None]
        sequences = [sequence for i in members if (sequence := self._sequences[i]) is not None]
        if not sequences:
            return
        share = self._coef / sum(sequence.targets.numel() for sequence in sequences)

        def loss(indices: list[int], tally: SumsByName) -> torch.Tensor:
            own = [sequences[i] for i in indices]
            scores = self._policy.score(own, temperature=1.0, pad_id=self._batch.pad_id)
            tally.add("train/observation_loss", -scores.logp)
            return -share * scores.logp.sum()

        self._tally.merge(self._policy.forward_backward(sequences, loss).tally)

    def update(self) -> None:
        """Drop gradients that the policy's update has not applied, as after `trainer.max_kl`."""
        self._policy.model.zero_grad(set_to_none=True)

    def leave_out(self) -> None:
        """Drop the gradients of the last `accumulate`."""
        self._policy.model.zero_grad(set_to_none=True)

    def metrics(self) -> dict[str, float]:
        """Return the mean cross-entropy of the observation tokens, before each update."""
        return self._tally.means()


def _observed_sequences(batch: StepBatch) -> Sequence[ScoredSequence | None]:
    """Make the sequences of a batch with observation tokens as targets; ``None`` for those without."""
    found: list[ScoredSequence | None] = []
    for trajectory in batch.trajectories:
        for sequence in trajectory.sequences:
            if trained_mask(sequence, by_expert=trajectory.id in batch.extras.expert_ids).any():
                mask = _observation_mask(sequence)
                scored = scored_sequence(sequence.token_ids, mask, sequence.images) if mask.any() else None
                found.append(scored)
    return found


def _observation_mask(sequence: TokenSequence) -> npt.NDArray[np.bool_]:
    """Mark the observation tokens after the first turn: bool [T]; shared tokens and images are excluded."""
    mask: npt.NDArray[np.bool_] = np.equal(sequence.sources, Source.OBSERVATION)
    mask[: max(sequence.shared, sequence.turns[0].end if sequence.turns else 0)] = False
    for image in sequence.images:
        mask[image.start : image.end] = False
    return mask
