"""One update's loss and gradient, added up over micro-batches, which may be computed in lanes.

A sequence whose tokens all have advantage 0 changes no gradient. It is not read at all, and counts in the loss's
denominators only. Where nothing has a gradient, everything is read: the measurements of a step are never empty.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from agentrl.algorithms.correction import loglinear
from agentrl.algorithms.types import LossInput, log_ratio
from agentrl.training.batch import StepBatch
from agentrl.training.critic import CriticStep
from agentrl.training.distributed.fsdp import reshard
from agentrl.training.forward.logprobs import TokenScores, score
from agentrl.training.forward.micro_batches import (
    MicroBatch,
    SumsByName,
    add_gradients,
    make_micro_batches,
    pad_to_ranks,
    rank_share,
)
from agentrl.training.forward.moe_replay import ReplayCount
from agentrl.training.forward.runner import LogprobRunner, Passes
from agentrl.training.forward.sequences import ScoredSequence
from agentrl.training.moe import (
    Routed,
    RouterBalance,
    assignments,
    token_weights,
)
from agentrl.training.objective import Objective
from agentrl.training.token_inputs import TokenValues, token_shares


class GradientPass:
    """Computes the gradients of a step's updates; the caller applies them.

    Args:
        model: The policy.
        objective: The algorithm.
        passes: How the model's passes are computed.
        batch: The step.
        values: Of the batch's tokens; `trainer_logp` is filled in by the first update.
        reads: Whether each sequence is read; see `sequences_to_read`.
        temperature: At which the tokens were sampled.
        pad_id: Any id of the vocabulary.
        critic: Its loss is a part of the policy's.
        learns: Compute gradients, or only what is measured.
        balance: Adds the balance of a mixture's experts to the loss.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        passes: Passes,
        batch: StepBatch,
        values: TokenValues,
        *,
        reads: Sequence[bool],
        temperature: float,
        pad_id: int,
        critic: CriticStep | None = None,
        learns: bool = True,
        balance: RouterBalance | None = None,
    ) -> None:
        self.tally = SumsByName()
        self.kl_old = 0.0
        """Of the policy to pi_old, over the last update's tokens."""
        self._computed_tokens = self._read_tokens = 0
        self.model = self._model = model
        self._objective, self._passes = objective, passes
        self._batch, self._values, self._reads = batch, values, reads
        self._temperature, self._pad_id = temperature, pad_id
        self._learning = [learns and own for own in learning_sequences(objective, batch, values.advantage)]
        self._critic, self._beside = critic, () if critic is None else tuple(critic.head.parameters())
        self._balance = balance
        self._workers = passes.lanes.count * passes.ranks.teams
        self._updates = 0
        self._kept: torch.Tensor | None = None
        self._chosen: torch.Tensor | None = None

    def accumulate(self, part: list[int]) -> float:
        """Add the gradient of the loss of some sequences, which are one update; gives the loss."""
        index = self._looked_over(part) if self._objective.looks_ahead else self._batch.token_index(part)
        weights = token_shares(self._objective, self._batch.owners, index, self._values.draws).to(self._model.device)
        work = [micro_batch for learns in (True, False) for micro_batch in self._micro_batches(part, learns=learns)]
        lanes, ranks = self._passes.lanes, self._passes.ranks
        work = pad_to_ranks(work, ranks.teams)
        self._count_tokens(work)
        own = rank_share(work, rank=ranks.team, ranks=ranks.teams)
        if self._balance is not None:
            self._count_routes(self._balance, work, own)
        compute = functools.partial(self._loss, weights)
        every_time = self._passes.every_time
        found = add_gradients(self._model, lanes, own, compute, every_time=every_time, beside=self._beside)
        reshard(self._model)
        self._values.trainer_logp.copy_(ranks.filled(self._values.trainer_logp))
        total, update = 0.0, SumsByName()
        for loss, tally in ranks.collect(found if ranks.speaks else []):
            total += loss
            update.merge(tally)
        self.tally.merge(update)
        self.kl_old = update.means().get("train/kl_old", 0.0)
        self._updates += 1
        return total

    def _count_tokens(self, work: Sequence[MicroBatch]) -> None:
        """Those that go through the model; a micro-batch that was split repeats the prefixes of its parts."""
        for part in ([self._batch.sequences[i] for i in micro_batch.sequences] for micro_batch in work):
            self._computed_tokens += self._passes.layout.tokens(part)
            self._read_tokens += sum(len(sequence) for sequence in part)

    def snapshot(self) -> dict[str, Any]:
        """What repeats the next update, besides model, objective and batch, as plain types and tensors."""
        values = {each.name: getattr(self._values, each.name) for each in fields(self._values)}
        return {
            "values": {**values, "trainer_logp": self._values.trainer_logp.clone()},
            "updates": self._updates,
            "reads": list(self._reads),
            "temperature": self._temperature,
            "pad_id": self._pad_id,
            "layout": asdict(replace(self._passes.layout, context=None, replay=None)),
            "lanes": self._passes.lanes.count,
            "ranks": self._passes.ranks.teams,
            "joins_critic": self._critic is not None,
        }

    def means(self) -> dict[str, float]:
        """Means over tokens under their final names, and the share of tokens that common prefixes saved; padding counts
        below 0.
        """
        return {**self.tally.means(), "train/tokens_saved": 1 - self._computed_tokens / self._read_tokens}

    def _micro_batches(self, part: list[int], *, learns: bool) -> list[MicroBatch]:
        members = [i for i in part if self._reads[i] and self._learning[i] == learns]
        sequences = [self._batch.sequences[i] for i in members]
        return make_micro_batches(members, sequences, layout=self._passes.layout, workers=self._workers, learns=learns)

    def _count_routes(self, balance: RouterBalance, work: Sequence[MicroBatch], own: Sequence[MicroBatch]) -> None:
        """Read what learns once more, for what routers do with all of an update's tokens."""
        counts = []
        for micro_batch in own:
            if not micro_batch.learns:
                continue
            part = [self._batch.sequences[i] for i in micro_batch.sequences]
            with torch.no_grad(), balance.recorded() as routed:
                self._score(part)
            if micro_batch.counts:
                counts.append(assignments(routed, token_weights(self._passes.layout, part, self._model.device)))
        reshard(self._model)
        counted = [micro_batch for micro_batch in work if micro_batch.learns and micro_batch.counts]
        read = (self._batch.sequences[i] for micro_batch in counted for i in micro_batch.sequences)
        busiest = balance.count(counts, sum(map(len, read)), self._passes.ranks)
        if busiest is not None:
            self.tally.add("train/moe_max_load", busiest)

    def _looked_over(self, part: list[int]) -> torch.Tensor:
        """The tokens of an update that train, after everything that is decided over all of them: int64 [selected]."""
        index = self._batch.token_index(part)
        tokens = self._loss_input(part, index.to(self._model.device), self._current(part))
        kept = self._objective.kept(tokens)
        self.tally.add("train/dropped_share", ~kept)
        if self._objective.masks_tokens:
            corrected = self._objective.correction(tokens.old_logp, tokens.behaviour_logp, tokens.sequence)
            self.tally.add("mismatch/clip_share", corrected.truncated)
        chosen = self._objective.chosen(tokens.select(kept))
        index, trained = index[kept.cpu()], index.to(kept.device)[kept]
        self._kept = torch.zeros(self._batch.tokens, dtype=torch.bool, device=self._model.device)
        self._kept[trained] = True
        self._chosen = self._kept.clone()
        if chosen is not None:
            self._chosen[trained] = chosen
        return index

    def _current(self, part: list[int]) -> torch.Tensor:
        """Log pi of the current policy, without gradient: [tokens of the part]."""
        where = self._batch.token_index(part).to(self._model.device)
        if self._updates == 0 or not self._objective.chooses_tokens:
            return self._values.trainer_logp[where]
        sequences = [self._batch.sequences[i] for i in part]
        policy = LogprobRunner(self._model, self._passes)
        return policy.scores(sequences, temperature=self._temperature, pad_id=self._pad_id).logp

    def _loss(self, weights: torch.Tensor, indices: list[int]) -> tuple[torch.Tensor, SumsByName]:
        part = [self._batch.sequences[i] for i in indices]
        balance = self._balance if torch.is_grad_enabled() else None
        recording: AbstractContextManager[list[Routed]] = nullcontext([]) if balance is None else balance.recorded()
        where = self._batch.token_index(indices).to(self._model.device)
        top_ids = self._values.teacher_top_ids
        with recording as routed, self._counting() as count:
            scores = self._score(part, others=None if top_ids is None else top_ids[where])
        tokens = replace(self._loss_input(indices, where, scores.logp), top_logp=scores.top_logp)
        trained, entropy, weight = tokens, scores.entropy, weights[where]
        if self._kept is not None:
            kept = self._kept[where]
            trained, entropy, weight = tokens.select(kept), entropy[kept], weight[kept]
        objective = self._objective.loss(trained, entropy)
        tally = SumsByName()
        tally.add("train/entropy", scores.entropy)
        tally.add("train/clip_share", objective.clipped)
        if not self._objective.masks_tokens:
            tally.add("mismatch/clip_share", objective.truncated)
        if count is not None:
            _add_routes(tally, count, part)
        log_rho = log_ratio(tokens.old_logp, tokens.logp.detach())
        tally.add("train/kl_old", log_rho.neg().exp() + log_rho - 1)
        if objective.kl is not None:
            tally.add("train/kl_reference", objective.kl)
        if tokens.teacher_logp is not None:
            tally.add("train/kl_teacher", scores.logp.detach() - tokens.teacher_logp)
        loss = (weight * objective.values).sum()
        if self._critic is not None and scores.values is not None:
            loss = loss + self._critic.joined_loss(scores.values, where, tally)
        if balance is not None:
            context = self._passes.layout.context
            uneven = balance.part(routed, token_weights(self._passes.layout, part, self._model.device))
            loss = loss + (uneven if context is None else context.total(uneven))
        return loss, tally

    def _counting(self) -> AbstractContextManager[ReplayCount | None]:
        """Of what routers would have done by themselves, while they are those of the step's start."""
        replay = self._passes.layout.replay
        return nullcontext() if replay is None or self._updates else replay.counted()

    def _score(self, part: Sequence[ScoredSequence], others: torch.Tensor | None = None) -> TokenScores:
        return score(
            self._model,
            part,
            temperature=self._temperature,
            pad_id=self._pad_id,
            layout=self._passes.layout,
            entropy_gradient=self._objective.uses_entropy,
            reader=self._passes.reader,
            value_head=None if self._critic is None else self._critic.head,
            others=others,
        )

    def _loss_input(self, indices: list[int], where: torch.Tensor, logp: torch.Tensor) -> LossInput:
        values = self._values
        counts = torch.tensor([self._batch.lengths[i] for i in indices], device=where.device)
        old, behaviour = self._old_logp(where, logp.detach()), values.behaviour_logp[where]
        expert = None if values.expert is None else values.expert[where]
        return LossInput(
            logp=logp,
            old_logp=old,
            behaviour_logp=behaviour if expert is None else torch.where(expert, old, behaviour),
            advantage=values.advantage[where],
            episode_return=values.episode_return[where],
            sequence=torch.arange(len(indices), device=where.device).repeat_interleave(counts),
            sequences=len(indices),
            reference_logp=None if values.reference_logp is None else values.reference_logp[where],
            teacher_logp=None if values.teacher_logp is None else values.teacher_logp[where],
            teacher_top_logp=None if values.teacher_top_logp is None else values.teacher_top_logp[where],
            expert=expert,
            entropy=None if values.entropy is None else values.entropy[where],
            chosen=None if self._chosen is None else self._chosen[where],
            draw=values.draw(self._updates),
        )

    def _old_logp(self, where: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
        """Log pi_old of some tokens, and the trainer's own filled in where this forward pass is the first."""
        values = self._values
        own = values.trainer_logp[where]
        own = torch.where(own.isnan(), logp, own)
        values.trainer_logp[where] = own
        match self._objective.proximal:
            case "trainer":  # of the same weights only rounding can tell them apart, which a loss with a kink shows
                return logp if self._updates == 0 else own
            case "behaviour":
                return values.behaviour_logp[where]
            case "loglinear":
                mu = values.behaviour_logp[where]
                return loglinear(logp, mu, values.version[where], old_version=values.step_version)


def _add_routes(tally: SumsByName, count: ReplayCount, part: Sequence[ScoredSequence]) -> None:
    tally.add("mismatch/routed_experts", torch.cat(count.differing))
    for sequence in part:
        known = 0 if sequence.routes is None else len(sequence.routes)
        tally.add("mismatch/routed_experts_known", torch.arange(len(sequence)) < known)


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
    return learning if any(learning) and not objective.looks_ahead else [True] * len(learning)
