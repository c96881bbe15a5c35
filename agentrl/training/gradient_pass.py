"""One update's loss and gradient, added up over micro-batches, which may be computed in lanes.

A sequence whose tokens all have advantage 0 changes no gradient. It is not read at all, and counts in the loss's
denominators only. Where nothing has a gradient, everything is read: the measurements of a step are never empty.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from agentrl.algorithms.loss_input import LossInput, log_ratio
from agentrl.config.schema import TrainerConfig
from agentrl.image import ImageReader
from agentrl.lanes import Lanes
from agentrl.training.logprobs import TokenScores, score
from agentrl.training.micro_batch_gradients import MicroBatch, add_gradients, cut
from agentrl.training.objective import Objective
from agentrl.training.ranks import Ranks
from agentrl.training.ranks.sharding import reshard
from agentrl.training.ranks.shares import share_of
from agentrl.training.step_batch import StepBatch
from agentrl.training.tally import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """What is known about a step's sampled tokens besides the batch, on the model's device; float32 [tokens] each."""

    advantage: torch.Tensor
    behaviour_logp: torch.Tensor
    old_logp: torch.Tensor
    """NaN where the first forward pass will fill it in."""
    reference_logp: torch.Tensor | None


class GradientPass:
    """Computes the gradients of a step's updates; the caller applies them.

    Args:
        model: The policy.
        objective: The algorithm.
        config: Sizes of micro-batches and chunks.
        batch: The step.
        values: Of the batch's tokens; `old_logp` is filled in by the first update.
        reads: Whether each sequence is read; see `sequences_to_read`.
        temperature: At which the tokens were sampled.
        pad_id: Any id of the vocabulary.
        lanes: Compute the micro-batches.
        ranks: Share the micro-batches out.
        reader: Prepares images.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        config: TrainerConfig,
        batch: StepBatch,
        values: TokenValues,
        *,
        reads: Sequence[bool],
        temperature: float,
        pad_id: int,
        lanes: Lanes,
        ranks: Ranks,
        reader: ImageReader | None = None,
    ) -> None:
        self.tally = Tally()
        self._model, self._objective, self._config = model, objective, config
        self._batch, self._values, self._reads = batch, values, reads
        self._temperature, self._pad_id = temperature, pad_id
        self._learning = learning_sequences(objective, batch, values.advantage)
        self._lanes, self._ranks, self._reader = lanes, ranks, reader

    def accumulate(self, part: list[int]) -> float:
        """Add the gradient of the loss of some sequences, which are one update; gives the loss."""
        weights = self._weights(part)
        work = [micro_batch for learns in (True, False) for micro_batch in self._micro_batches(part, learns=learns)]
        own = share_of(work, rank=self._ranks.rank, ranks=self._ranks.count)
        compute, every_time = functools.partial(self._loss, weights), self._config.fsdp.reduce
        found = add_gradients(self._model, self._lanes, own, compute, every_time=every_time)
        reshard(self._model)
        self._values.old_logp.copy_(self._ranks.filled(self._values.old_logp))
        total = 0.0
        for loss, tally in self._ranks.collect(found):
            total += loss
            self.tally.merge(tally)
        return total

    def _micro_batches(self, part: list[int], *, learns: bool) -> list[MicroBatch]:
        members = [i for i in part if self._reads[i] and self._learning[i] == learns]
        lengths = [len(self._batch.sequences[i]) for i in members]
        return cut(members, lengths, budget=self._config.tokens_per_micro_batch, learns=learns)

    def _weights(self, part: list[int]) -> torch.Tensor:
        """Share of every token of the step in this update's loss, from the tokens that the loss uses: [tokens]."""
        index = self._batch.token_index(part)
        if self._objective.drops_tokens:
            index = index[self._kept(index)]
        weights = torch.zeros(self._batch.tokens)
        weights[index] = self._objective.weights(self._batch.owners.select(index)).float()
        return weights.to(self._model.device)

    def _kept(self, index: torch.Tensor) -> torch.Tensor:
        where = index.to(self._model.device)
        sequence = self._batch.owners.sequence[index].to(self._model.device)
        old_logp, behaviour_logp = self._values.old_logp[where], self._values.behaviour_logp[where]
        return self._objective.correction(old_logp, behaviour_logp, sequence).kept.cpu()

    def _loss(self, weights: torch.Tensor, indices: list[int]) -> tuple[torch.Tensor, Tally]:
        scores = score(
            self._model,
            [self._batch.sequences[i] for i in indices],
            temperature=self._temperature,
            pad_id=self._pad_id,
            chunk=self._config.logprob_chunk,
            entropy_gradient=self._objective.uses_entropy,
            reader=self._reader,
        )
        where = self._batch.token_index(indices).to(self._model.device)
        tokens = self._loss_input(indices, where, scores)
        reference = None if self._values.reference_logp is None else self._values.reference_logp[where]
        objective = self._objective.loss(tokens, scores.entropy, reference)
        tally = Tally()
        tally.add("train/entropy", scores.entropy)
        tally.add("train/clip_share", objective.clipped)
        tally.add("mismatch/clip_share", objective.truncated)
        log_rho = log_ratio(tokens.old_logp, tokens.logp.detach())
        tally.add("train/kl_old", log_rho.neg().exp() + log_rho - 1)
        if objective.kl is not None:
            tally.add("train/kl_reference", objective.kl)
        return (weights[where] * objective.values).sum(), tally

    def _loss_input(self, indices: list[int], where: torch.Tensor, scores: TokenScores) -> LossInput:
        old_logp = self._values.old_logp[where]
        old_logp = torch.where(old_logp.isnan(), scores.logp.detach(), old_logp)
        self._values.old_logp[where] = old_logp
        counts = torch.tensor([self._batch.lengths[i] for i in indices], device=where.device)
        return LossInput(
            logp=scores.logp,
            old_logp=old_logp,
            behaviour_logp=self._values.behaviour_logp[where],
            advantage=self._values.advantage[where],
            sequence=torch.arange(len(indices), device=where.device).repeat_interleave(counts),
            sequences=len(indices),
        )


def learning_sequences(objective: Objective, batch: StepBatch, advantage: torch.Tensor) -> list[bool]:
    """Whether each sequence has a gradient."""
    if not objective.zero_advantage_is_idle:
        return [True] * len(batch.sequences)
    return [bool(own.any()) for own in torch.split(advantage, batch.lengths)]


def sequences_to_read(objective: Objective, batch: StepBatch, advantage: torch.Tensor) -> list[bool]:
    """Whether each sequence goes through the model: those that learn, or all if none does or the loss has to choose
    among the tokens of all of them.
    """
    learning = learning_sequences(objective, batch, advantage)
    return learning if any(learning) and not objective.drops_tokens else [True] * len(learning)
