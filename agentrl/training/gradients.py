"""Loss and gradient of an update: the configured functions, their inputs per token, and the sum over micro-batches.

A sequence whose tokens all have advantage 0 has no gradient: it skips the forward pass, but still counts in the
denominators of the loss. If no sequence has a gradient, all are computed, so that a step always has metrics. An update
whose tokens are all rejected has no gradient either.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import torch

from agentrl.algorithms.aggregation import Aggregation, TokenOwners, token_weights
from agentrl.algorithms.correction import Correction, CorrectionMode, correction, loglinear
from agentrl.algorithms.group_differences import (
    groups_with_advantages,
    groups_with_different_rewards,
    uses_own_advantages,
)
from agentrl.algorithms.kl import KLEstimator, policy_kl
from agentrl.algorithms.options import check_options
from agentrl.algorithms.traits import advantage_weighted, choice_of, compares_group, couples_episodes, reads_policy
from agentrl.algorithms.types import EpisodeBatch, Estimate, LossInput, TokenLoss, log_ratio
from agentrl.config.algorithm import ReferenceConfig
from agentrl.config.config import AlgorithmConfig
from agentrl.registry import Kind, lookup
from agentrl.training.algorithm_functions import (
    bind,
    check_advantage,
    check_estimator,
    check_kept,
    check_loss,
    check_loss_values,
    check_needs,
    check_proximal,
)
from agentrl.training.batch import StepBatch
from agentrl.training.forward.logprobs import TokenScores
from agentrl.training.forward.micro_batches import MicroBatch
from agentrl.training.forward.runner import ModelRunner, PassHook, SumsByName
from agentrl.training.signals.base import JoinedUpdates
from agentrl.training.token_record import TokenRecord

DUMPED_TOKENS = ("episode_return", "teacher_logp", "teacher_top_logp", "entropy")
"""Columns of `GradientPass` that a dump of an update contains among the tokens' values."""
DUMPED_STEP = (
    "advantage",
    "behaviour_logp",
    "reference_logp",
    "expert",
    "version",
    "step_version",
    "sample_counts",
    "seed",
)
"""Parts of the `StepBatch` that a dump of an update contains among the tokens' values."""


class Objective:
    """Estimator, loss, correction, filters and regularizers of a config, with their options checked.

    With `joint_loss`, the policy's passes also compute the loss of a signal.

    Raises:
        ConfigError: the functions do not take an option, an option conflicts with another or would be ignored, or a
            function needs inputs that the trainer does not have.
        UnknownNameError: an estimator, loss or filter is not registered.
    """

    def __init__(self, config: AlgorithmConfig, *, joint_loss: bool = False) -> None:
        estimator, loss = lookup(Kind.ADVANTAGE, config.advantage), lookup(Kind.LOSS, config.loss)
        filters = {name: lookup(Kind.FILTER, name) for name in config.filters}
        check_estimator(config, estimator)
        check_loss(config, loss)
        check_proximal(config, loss, filters.values())
        for name, function in filters.items():
            check_needs("filter", name, function)
        self._config = config
        self._estimate: Callable[[EpisodeBatch], torch.Tensor | Estimate] = bind(
            "advantage estimator", config.advantage, estimator, config.advantage_options
        )
        self._loss: Callable[[LossInput], TokenLoss] = bind("loss", config.loss, loss, config.loss_options)
        self._filters: dict[str, Callable[[LossInput], torch.Tensor]] = {
            name: bind("filter", name, function, config.filters[name]) for name, function in filters.items()
        }
        self.reads_policy = any(reads_policy.of(function) for function in filters.values())
        """True if a filter compares with the current policy."""
        self._choice, self._choose = choice_of(loss), _bound_choice(loss, config.loss_options)
        self._kl_estimator = KLEstimator((config.reference or ReferenceConfig()).kl_estimator)
        self._mode = CorrectionMode(config.correction.mode)
        self.proximal: Literal["trainer", "behaviour", "loglinear"] = config.correction.proximal
        self.compares_groups = compares_group.of(estimator)
        self._uses_own_advantages = uses_own_advantages(estimator)
        self.drops_tokens = bool(
            self._mode.drops_tokens or self._filters or (self._choice is not None and self._choice.drops)
        )
        """True if tokens can be dropped from the loss, so that pi_old is needed before the denominators."""
        self.masks_tokens = self._mode.drops_tokens
        """True if the correction drops tokens instead of truncating their weights."""
        self.chooses_tokens = self._choice is not None and not self._choice.drops
        """True if the loss first selects among all tokens of an update, under the current policy."""
        self.couples_episodes = couples_episodes.of(loss)
        """True if the loss compares the episodes of a group, which therefore must be in the same update."""
        self.uses_entropy = config.entropy_coef != 0
        regularized = config.kl_coef != 0 or self.uses_entropy or joint_loss
        self.zero_advantage_is_idle = advantage_weighted.of(loss) and not regularized
        """True if a sequence whose advantages are exactly 0 has no gradient."""

    @property
    def looks_ahead(self) -> bool:
        """True if filters or the loss must see all tokens of an update before its loss is computed."""
        return self.drops_tokens or self.chooses_tokens

    def estimate(self, episodes: EpisodeBatch) -> Estimate:
        """Compute the advantage of every sampled token, float32 [tokens], and a critic's value targets, if any.

        Raises:
            TrainingError: the estimator returned another shape, or numbers that are not finite.
        """
        found = self._estimate(episodes)
        values = check_advantage(
            self._config.advantage,
            found.advantage if isinstance(found, Estimate) else found,
            episodes.token_turn.numel(),
        )
        target = found.value_target if isinstance(found, Estimate) else None
        return Estimate(advantage=values, value_target=None if target is None else target.float())

    def differing_groups(self, episodes: EpisodeBatch) -> torch.Tensor:
        """Mark the groups whose episodes the estimator tells apart: bool [groups]; see `algorithms.differences`.

        Raises:
            TrainingError: the estimator failed.
        """
        if self._uses_own_advantages:
            return groups_with_advantages(self.estimate, episodes)
        return groups_with_different_rewards(episodes)

    def correction(self, old_logp: torch.Tensor, behaviour_logp: torch.Tensor, sequence: torch.Tensor) -> Correction:
        """Compute the train/inference correction of whole sequences' tokens: see `agentrl.algorithms.correction`."""
        settings = self._config.correction
        return correction(self._mode, old_logp, behaviour_logp, sequence, cap=settings.cap, band=settings.band)

    @property
    def rejecters(self) -> tuple[str, ...]:
        """Names of the parts that may reject tokens: the correction, the filters, and the loss's choice."""
        filters = (f"filter:{name}" for name in self._filters)
        return (f"correction:{self._mode}", *filters, f"loss:{self._config.loss}")

    def mark_rejected(self, tokens: LossInput) -> torch.Tensor:
        """Find the part that rejects each of an update's tokens: uint8 [tokens].

        0 means that the token is trained, which an expert's tokens always are; 1 is the first of `rejecters`.
        """
        corrected = self.correction(tokens.old_logp, tokens.behaviour_logp, tokens.sequence)
        rejected = (~corrected.kept).to(torch.uint8)
        for number, (name, keep) in enumerate(self._filters.items(), 2):
            rejected[(rejected == 0) & ~check_kept(name, keep(tokens), tokens)] = number
        if tokens.expert is not None:
            rejected[tokens.expert] = 0
        if self._choice is not None and self._choice.drops:
            kept = rejected == 0
            rejected[kept] = torch.where(self._choose(tokens.select(kept)), 0, len(self.rejecters)).to(torch.uint8)
        return rejected

    def choose(self, tokens: LossInput) -> torch.Tensor | None:
        """Compute the loss's choice among the tokens that train: [tokens, …]; ``None`` if it does not choose."""
        return self._choose(tokens) if self.chooses_tokens else None

    def weights(self, owners: TokenOwners) -> torch.Tensor:
        """Compute the weight of each token in the loss of an optimizer step; needs all its tokens: float64 [tokens]."""
        return token_weights(Aggregation(self._config.aggregation), owners, norm_length=self._config.norm_length)

    def loss(self, tokens: LossInput, entropy: torch.Tensor, tally: SumsByName) -> TokenLoss:
        """Compute the loss of the tokens that train, before aggregation, and which of them the policy loss clips.

        It is the policy loss times the correction weight, plus the KL and entropy terms.

        Args:
            tokens: Tokens of whole sequences.
            entropy: Entropy of the policy: [tokens].
            tally: Sums to which measurements of these tokens are added.

        Raises:
            TrainingError: the loss did not return one number with a gradient for each token.
        """
        policy = self._loss(tokens)
        check_loss_values(self._config.loss, policy, tokens)
        corrected = self.correction(tokens.old_logp, tokens.behaviour_logp, tokens.sequence)
        weights = corrected.weights
        if tokens.expert is not None:
            weights = torch.where(tokens.expert, 1.0, weights)
        values = policy.values * weights
        tally.add("train/clip_share", policy.clipped)
        if not self.masks_tokens:
            tally.add("mismatch/clip_share", corrected.truncated)
        if self._config.kl_coef and tokens.reference_logp is not None:
            kl = policy_kl(self._kl_estimator, tokens)
            values = values + self._config.kl_coef * kl
            tally.add("train/kl_reference", kl)
        if self.uses_entropy:
            values = values - self._config.entropy_coef * entropy
        return TokenLoss(values=values, clipped=policy.clipped)


def _bound_choice(loss: Callable[..., Any], options: dict[str, Any]) -> Callable[[LossInput], torch.Tensor]:
    """Bind the loss's choice to those of the loss's options that it takes."""
    choice = choice_of(loss)
    if choice is None:
        return lambda tokens: torch.ones_like(tokens.logp, dtype=torch.bool)
    known = inspect.signature(choice.choose).parameters
    own = {name: value for name, value in check_options(loss, options).items() if name in known}
    return functools.partial(choice.choose, **own)


def score_ahead(batch: StepBatch, objective: Objective, policy: ModelRunner, *, policy_learns: bool) -> TokenScores:
    """Score the step's tokens that must be known before the first update; the others are NaN.

    Those are the tokens that the first update's forward pass cannot provide, and all of them if the objective looks
    ahead. If the policy does not learn, because only the signals' models train, its single forward pass provides all.
    """
    logp, entropy = torch.full((2, batch.tokens), math.nan, device=policy.model.device)
    if needed := _sequences_to_score(batch, objective, policy_learns=policy_learns):
        sequences = [batch.sequences[i] for i in needed]
        scores = policy.logprobs(sequences, temperature=batch.temperature)
        where = batch.token_index(needed).to(logp.device)
        logp[where], entropy[where] = scores.logp, scores.entropy
    return TokenScores(logp=logp, entropy=entropy)


def loss_columns(batch: StepBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the parts of `LossInput` that the batch provides, for all its tokens: [tokens, …] each, on a device."""
    teacher, episodes = batch.teacher, batch.episodes
    columns = {
        "behaviour_logp": batch.behaviour_logp,
        "advantage": batch.advantage,
        "episode_return": episodes.to_tokens(episodes.returns).float(),
        "turn": episodes.token_turn,
        "episode": batch.owners.trajectory,
        "group": batch.owners.group,
        "reference_logp": batch.reference_logp,
        "teacher_logp": None if teacher is None else teacher.logp,
        "teacher_top_logp": None if teacher is None else teacher.top_logp,
        "expert": batch.expert,
    }
    return {name: column.to(device) for name, column in columns.items() if column is not None}


def _sequences_to_score(batch: StepBatch, objective: Objective, *, policy_learns: bool) -> list[int]:
    """Find the sequences whose log-probabilities must be known before the first update."""
    if not objective.looks_ahead and (objective.proximal != "trainer" or not policy_learns):
        return []
    free = set() if objective.looks_ahead else set(batch.parts[0])
    return [i for i, read in enumerate(batch.needs_forward) if read and i not in free]


def token_shares(
    objective: Objective, owners: TokenOwners, index: torch.Tensor, sample_counts: torch.Tensor | None
) -> torch.Tensor:
    """Compute the weight of each token of a step in the loss: float32 [tokens].

    Tokens outside `index`, int64 [selected], have weight 0. A trajectory that was drawn twice (`sample_counts`: int64
    [trajectories]) counts as two.
    """
    shares = torch.zeros(owners.sequence.numel())
    if sample_counts is None:
        shares[index] = objective.weights(owners.select(index)).float()
        return shares
    times = sample_counts[owners.trajectory[index]]
    drawn = index.repeat_interleave(times)
    first = (times.cumsum(0) - times).repeat_interleave(times)
    copy = torch.arange(drawn.numel()) - first
    most, own = int(sample_counts.max()), owners.select(drawn)
    copies = TokenOwners(sequence=own.sequence * most + copy, trajectory=own.trajectory * most + copy, group=own.group)
    return shares.index_add(0, drawn, objective.weights(copies).float())


class GradientPass:
    """Computation of the gradients of a step's updates; the caller applies them.

    Args:
        policy: Runner of the policy.
        objective: Estimator, loss and corrections.
        batch: The step's batch.
        ahead: Result of `score_ahead`.
        joint: Signal whose loss is added to the policy's.
        learns: ``False`` to compute only the metrics; no parameter gets a gradient.
        hooks: Hooks into the policy's passes.
    """

    def __init__(
        self,
        policy: ModelRunner,
        objective: Objective,
        batch: StepBatch,
        ahead: TokenScores,
        *,
        joint: JoinedUpdates | None = None,
        learns: bool = True,
        hooks: Sequence[PassHook] = (),
    ) -> None:
        self.tally = SumsByName()
        self.record = TokenRecord(ahead.logp)
        """Values of the step's tokens in their latest updates."""
        self.kl_old = 0.0
        """KL of the policy to pi_old, over the last update's tokens."""
        self._computed_tokens = self._read_tokens = 0
        self.model, self._policy, self.objective, self._hooks = policy.model, policy, objective, hooks
        self.batch, self._columns = batch, loss_columns(batch, policy.model.device)
        """Batch, and the parts of `LossInput` that are known before the passes: [tokens, …] each."""
        if objective.looks_ahead:
            self._columns["entropy"] = ahead.entropy
        self._version = batch.version.to(self.model.device)
        self.learns = learns
        self._needs_grad = [learns and own for own in needs_gradient(objective, batch)]
        self._joint, self._head_parameters = joint, () if joint is None else tuple(joint.head.parameters())
        self._updates = 0
        self.before: dict[str, Any] = {}
        """Inputs of the last update, except for model, objective and batch, as plain types and tensors: enough to
        repeat it.
        """
        self.loss = 0.0
        self._kept: torch.Tensor | None = None

    def accumulate(self, part: list[int]) -> float:
        """Add the gradient of one update's loss, over the sequences `part`; return the loss."""
        self.before = self._snapshot(part)
        self.record.begin(self.batch.token_index(part))
        index = self._select_tokens(part) if self.objective.looks_ahead else self.batch.token_index(part)
        weights = token_shares(self.objective, self.batch.owners, index, self.batch.sample_counts)
        members = [i for i in part if self.batch.needs_forward[i]]
        # without any token to train, gradients of 0 would let the optimizer's momentum move the weights
        trains = self._joint is not None or bool((weights > 0).any())
        result = self._policy.forward_backward(
            [self.batch.sequences[i] for i in members],
            functools.partial(self._loss, weights.to(self.model.device)),
            numbers=members,
            needs_grad=[trains and self._needs_grad[i] for i in members],
            head_parameters=self._head_parameters,
            hooks=self._hooks,
        )
        self._count_tokens(result.work)
        self.record.share(self._policy.passes.ranks)
        self.tally.merge(result.tally)
        self.kl_old = result.tally.means().get("train/kl_old", 0.0)
        self._updates += 1
        self.loss = result.loss
        return result.loss

    def _count_tokens(self, work: Sequence[MicroBatch]) -> None:
        """Count the tokens that go through the model; each part of a split micro-batch repeats the shared prefixes."""
        for part in ([self.batch.sequences[i] for i in micro_batch.sequences] for micro_batch in work):
            self._computed_tokens += self._policy.passes.layout.tokens(part)
            self._read_tokens += sum(len(sequence) for sequence in part)

    def _snapshot(self, part: list[int]) -> dict[str, Any]:
        batch, passes = self.batch, self._policy.passes
        values = {name: self._columns.get(name) for name in DUMPED_TOKENS}
        values |= {name: getattr(batch, name) for name in DUMPED_STEP}
        values["trainer_logp"] = self.record.trainer_logp.clone()
        values["teacher_top_ids"] = None if batch.teacher is None else batch.teacher.top_ids
        return {
            "part": part,
            "values": values,
            "updates": self._updates,
            "reads": list(batch.needs_forward),
            "temperature": batch.temperature,
            "layout": asdict(replace(passes.layout, context=None, replay=None)),
            "lanes": passes.lanes.count,
            "ranks": passes.ranks.dp_size,
            "joins_critic": self._joint is not None,
        }

    def means(self) -> dict[str, float]:
        """Return means over tokens by final name, with the share of tokens that common prefixes saved.

        Padding can make that share negative.
        """
        return {**self.tally.means(), "train/tokens_saved": 1 - self._computed_tokens / self._read_tokens}

    def _select_tokens(self, part: list[int]) -> torch.Tensor:
        """Apply filters and the loss's choice to all tokens of an update; return those that train: int64 [selected]."""
        index = self.batch.token_index(part)
        tokens = self._loss_input(part, index.to(self.model.device), self._current(part))
        rejected = self.objective.mark_rejected(tokens)
        self.record.rejected[index.to(rejected.device)] = rejected
        kept = rejected == 0
        self.tally.add("train/dropped_share", ~kept)
        if self.objective.masks_tokens:
            corrected = self.objective.correction(tokens.old_logp, tokens.behaviour_logp, tokens.sequence)
            self.tally.add("mismatch/clip_share", corrected.truncated)
        chosen = self.objective.choose(tokens.select(kept))
        index, trained = index[kept.cpu()], index.to(kept.device)[kept]
        self._kept = torch.zeros(self.batch.tokens, dtype=torch.bool, device=self.model.device)
        self._kept[trained] = True
        self._columns["chosen"] = self._kept
        if chosen is not None:
            self._columns["chosen"] = chosen.new_zeros((self.batch.tokens, *chosen.shape[1:]))
            self._columns["chosen"][trained] = chosen
        return index

    def _current(self, part: list[int]) -> torch.Tensor:
        """Compute log pi of the current policy, without gradient: [tokens of the part]."""
        where = self.batch.token_index(part).to(self.model.device)
        if self._updates == 0 or not (self.objective.chooses_tokens or self.objective.reads_policy):
            return self.record.trainer_logp[where]
        sequences = [self.batch.sequences[i] for i in part]
        return self._policy.logprobs(sequences, temperature=self.batch.temperature).logp

    def _loss(self, weights: torch.Tensor, indices: list[int], tally: SumsByName) -> torch.Tensor:
        where = self.batch.token_index(indices).to(self.model.device)
        top_ids = None if self.batch.teacher is None else self.batch.teacher.top_ids
        scores = self._policy.score(
            [self.batch.sequences[i] for i in indices],
            temperature=self.batch.temperature,
            entropy_gradient=self.objective.uses_entropy,
            value_head=None if self._joint is None else self._joint.head,
            others=None if top_ids is None else top_ids[where],
        )
        tokens = replace(self._loss_input(indices, where, scores.logp), top_logp=scores.top_logp)
        self.record.add(where, tokens, scores.entropy)
        own, trained, entropy, weight = where, tokens, scores.entropy, weights[where]
        if self._kept is not None:
            kept = self._kept[where]
            own, trained, entropy, weight = where[kept], tokens.select(kept), entropy[kept], weight[kept]
        tally.add("train/entropy", scores.entropy)
        policy = self.objective.loss(trained, entropy, tally)
        self.record.add_clipped(own, policy.clipped)
        log_rho = log_ratio(tokens.old_logp, tokens.logp.detach())
        tally.add("train/kl_old", log_rho.neg().exp() + log_rho - 1)
        if tokens.teacher_logp is not None:
            tally.add("train/kl_teacher", scores.logp.detach() - tokens.teacher_logp)
        loss = (weight * policy.values).sum()
        if self._joint is not None and scores.values is not None:
            loss = loss + self._joint.joined_loss(scores.values, where, tally)
        return loss

    def _loss_input(self, indices: list[int], where: torch.Tensor, logp: torch.Tensor) -> LossInput:
        """Make the input of the loss for whole sequences, whose tokens are at the indices `where` of the step."""
        own = {name: column[where] for name, column in self._columns.items()}
        counts = torch.tensor([self.batch.lengths[i] for i in indices], device=where.device)
        old = self._old_logp(own["behaviour_logp"], where, logp.detach())
        if "expert" in own:
            own["behaviour_logp"] = torch.where(own["expert"], old, own["behaviour_logp"])
        return LossInput(
            **own,
            logp=logp,
            old_logp=old,
            sequence=torch.arange(len(indices), device=where.device).repeat_interleave(counts),
            sequences=len(indices),
            draw=self.batch.draw(self._updates),
        )

    def _old_logp(self, behaviour_logp: torch.Tensor, where: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
        """Return log pi_old of some tokens; if this forward pass is the first, record it as the trainer's."""
        trainer = self.record.keep_first(where, logp)
        match self.objective.proximal:
            case "trainer":  # before the first update they differ by rounding only, which a loss with a kink would show
                return logp if self._updates == 0 else trainer
            case "behaviour":
                return behaviour_logp
            case "loglinear":
                return loglinear(logp, behaviour_logp, self._version[where], old_version=self.batch.step_version)


def needs_gradient(objective: Objective, batch: StepBatch) -> list[bool]:
    """Return whether each sequence has a gradient."""
    if not objective.zero_advantage_is_idle:
        return [True] * len(batch.sequences)
    return [bool(own.any()) for own in torch.split(batch.advantage, batch.lengths)]


def needs_forward_pass(objective: Objective, batch: StepBatch) -> list[bool]:
    """Return True for each sequence that goes through the model: those with a gradient, or all if none has one or the
    objective looks ahead.
    """
    learning = needs_gradient(objective, batch)
    return learning if any(learning) and not objective.looks_ahead else [True] * len(learning)
