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
from agentrl.lanes import Lanes
from agentrl.training.batching import micro_batches
from agentrl.training.logprobs import TokenScores, score
from agentrl.training.objective import Objective
from agentrl.training.step_batch import StepBatch
from agentrl.training.tally import Tally

BACKWARD_COST = 3
"""A forward and a backward pass, in forward passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """What is known about a step's sampled tokens besides the batch, on the model's device; float32 [tokens] each."""

    advantage: torch.Tensor
    behaviour_logp: torch.Tensor
    old_logp: torch.Tensor
    """NaN where the first forward pass will fill it in."""
    reference_logp: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that go through the model together."""

    sequences: list[int]
    learns: bool
    """Whether it has a gradient."""
    cost: int
    """Relative to others."""


@dataclass(slots=True)
class _Sums:
    """What a lane has added up."""

    loss: float
    tally: Tally
    gradients: list[torch.Tensor | None] | None
    """Of each parameter; ``None`` where they went into the parameters."""


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
    ) -> None:
        self.tally = Tally()
        self._model, self._objective, self._config = model, objective, config
        self._batch, self._values, self._reads = batch, values, reads
        self._temperature, self._pad_id = temperature, pad_id
        self._learning = learning_sequences(objective, batch, values.advantage)
        self._lanes = lanes
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def accumulate(self, part: list[int]) -> float:
        """Add the gradient of the loss of some sequences, which are one update; gives the loss."""
        weights = self._weights(part)
        shares = share_out(self._micro_batches(part), self._lanes.count)
        sums = self._lanes.run(functools.partial(self._add_up, weights=weights, alone=len(shares) == 1), shares)
        for own in sums:
            self.tally.merge(own.tally)
            if own.gradients is not None:
                _add_gradients(self._parameters, own.gradients)
        return sum(own.loss for own in sums)

    def _micro_batches(self, part: list[int]) -> list[MicroBatch]:
        found = []
        for learns in (True, False):
            members = [i for i in part if self._reads[i] and self._learning[i] == learns]
            lengths = [len(self._batch.sequences[i]) for i in members]
            for chosen in micro_batches(lengths, self._config.tokens_per_micro_batch):
                cost = len(chosen) * lengths[chosen[0]] * (BACKWARD_COST if learns else 1)
                found.append(MicroBatch([members[k] for k in chosen], learns, cost))
        return found

    def _add_up(self, share: list[MicroBatch], *, weights: torch.Tensor, alone: bool) -> _Sums:
        """Compute micro-batches one after the other; in a lane beside others, gradients are kept apart."""
        sums = _Sums(0.0, Tally(), None if alone else [None] * len(self._parameters))
        for micro_batch in share:
            with torch.set_grad_enabled(micro_batch.learns):
                loss = self._loss(micro_batch.sequences, weights, sums.tally)
            if micro_batch.learns and sums.gradients is None:
                torch.autograd.backward(loss)
            elif micro_batch.learns:
                found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
                sums.gradients = [_plus(old, new) for old, new in zip(sums.gradients, found, strict=True)]
            sums.loss += float(loss.detach())
        return sums

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

    def _loss(self, indices: list[int], weights: torch.Tensor, tally: Tally) -> torch.Tensor:
        scores = score(
            self._model,
            [self._batch.sequences[i] for i in indices],
            temperature=self._temperature,
            pad_id=self._pad_id,
            chunk=self._config.logprob_chunk,
            entropy_gradient=self._objective.uses_entropy,
        )
        where = self._batch.token_index(indices).to(self._model.device)
        tokens = self._loss_input(indices, where, scores)
        reference = None if self._values.reference_logp is None else self._values.reference_logp[where]
        objective = self._objective.loss(tokens, scores.entropy, reference)
        tally.add("train/entropy", scores.entropy)
        tally.add("train/clip_share", objective.clipped)
        tally.add("mismatch/clip_share", objective.truncated)
        log_rho = log_ratio(tokens.old_logp, tokens.logp.detach())
        tally.add("train/kl_old", log_rho.neg().exp() + log_rho - 1)
        if objective.kl is not None:
            tally.add("train/kl_reference", objective.kl)
        return (weights[where] * objective.values).sum()

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


def share_out(micro_batches: Sequence[MicroBatch], lanes: int) -> list[list[MicroBatch]]:
    """The micro-batches of each lane: the dearest first, each to the lane with the least to do."""
    shares: list[list[MicroBatch]] = [[] for _ in range(max(1, min(lanes, len(micro_batches))))]
    costs = [0] * len(shares)
    for micro_batch in sorted(micro_batches, key=lambda micro_batch: -micro_batch.cost):
        least = costs.index(min(costs))
        shares[least].append(micro_batch)
        costs[least] += micro_batch.cost
    return shares


def _plus(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    if old is None or new is None:
        return new if old is None else old
    return old.add_(new)


def _add_gradients(parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = _plus(parameter.grad, gradient)
