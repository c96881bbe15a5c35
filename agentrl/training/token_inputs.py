"""Numbers that losses read of a step's sampled tokens, and the share of each token in the loss of an update."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from agentrl.algorithms.aggregation import TokenOwners
from agentrl.training.batch import Selection, StepBatch, StepInput
from agentrl.training.forward.runner import ModelRunner
from agentrl.training.objective import Objective
from agentrl.training.rewards import RewardShaping
from agentrl.training.signals.base import SignalUpdates


def token_shares(
    objective: Objective, owners: TokenOwners, index: torch.Tensor, sample_counts: torch.Tensor | None
) -> torch.Tensor:
    """Weight of each token of a step, 0 for those that are not of this update: float32 [tokens].

    Args:
        objective: Knows the aggregation.
        owners: Of the tokens of the step.
        index: The tokens of the update that train: int64 [selected].
        sample_counts: How often each trajectory was drawn: int64 [trajectories]; once when left out. One that was
            drawn twice counts as two.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """Step that is ready for its updates: who trains, on which tokens, with which advantages."""

    given: StepInput
    selection: Selection
    """The experts' episodes are in it."""
    batch: StepBatch
    """With what all signals know."""
    advantage: torch.Tensor
    """float32 [tokens], on the CPU."""
    needs_forward: list[bool]
    """True for each sequence that goes through the policy."""
    signals: Sequence[SignalUpdates]
    """Those whose models are trained beside the policy."""
    policy_learns: bool
    """False while signals are trained alone."""
    metrics: Mapping[str, float]
    """Of what was renewed and trained on the way, under their final names."""

    @property
    def first(self) -> list[int]:
        """The sequences that the policy reads before it changes."""
        return self.batch.parts[0] if self.policy_learns else list(range(len(self.batch.sequences)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """Numbers of a step's sampled tokens besides the batch, on the model's device; float32 [tokens] each."""

    advantage: torch.Tensor
    episode_return: torch.Tensor
    behaviour_logp: torch.Tensor
    trainer_logp: torch.Tensor
    """log-probabilities of the trainer before the first update; NaN where the first forward pass will fill it in."""
    version: torch.Tensor
    """Weight version that sampled each token: int32."""
    step_version: int
    """Weight version at the start of the step."""
    reference_logp: torch.Tensor | None = None
    teacher_logp: torch.Tensor | None = None
    teacher_top_ids: torch.Tensor | None = None
    """What a teacher finds most probable in each token's place: int64 [tokens, k]."""
    teacher_top_logp: torch.Tensor | None = None
    """float32 [tokens, k]."""
    expert: torch.Tensor | None = None
    """Bool: an expert wrote the token, and its `behaviour_logp` means nothing."""
    entropy: torch.Tensor | None = None
    """Before the first update; only where something looks ahead."""
    sample_counts: torch.Tensor | None = None
    """How often each trajectory was drawn: int64 [trajectories], on the CPU; once when left out."""
    seed: int = 0
    """Of the run."""

    def draw(self, update: int) -> int:
        """Seed of random choices in an update of the step, counted from 0: in [0, 2^63)."""
        return random.Random(f"{self.seed} {self.step_version} {update}").getrandbits(63)


def token_values(
    step: PreparedStep, objective: Objective, policy: ModelRunner, shaping: RewardShaping, *, seed: int
) -> TokenValues:
    """Gather the values, and score pi_old where the first update's forward pass cannot give it.

    Args:
        step: Whose tokens they are.
        objective: The algorithm.
        policy: As it is before the first update.
        shaping: May draw the trajectories anew.
        seed: Of the run.
    """
    batch, device, teacher = step.batch, policy.model.device, step.batch.teacher
    returns = batch.episodes.returns
    trainer_logp = torch.full((batch.tokens,), math.nan, device=device)
    entropy = torch.full_like(trainer_logp, math.nan) if objective.looks_ahead else None
    if needed := _scored_before(step, objective):
        sequences = [batch.sequences[i] for i in needed]
        scores = policy.logprobs(sequences, temperature=step.given.temperature, pad_id=step.given.pad_id)
        where = batch.token_index(needed).to(device)
        trainer_logp[where] = scores.logp
        if entropy is not None:
            entropy[where] = scores.entropy
    return TokenValues(
        advantage=step.advantage.to(device),
        episode_return=batch.episodes.to_tokens(returns).float().to(device),
        behaviour_logp=batch.behaviour_logp.to(device),
        trainer_logp=trainer_logp,
        version=batch.version.to(device),
        step_version=batch.step_version,
        reference_logp=batch.reference_logp,
        teacher_logp=None if teacher is None else teacher.logp,
        teacher_top_ids=None if teacher is None else teacher.top_ids,
        teacher_top_logp=None if teacher is None else teacher.top_logp,
        expert=None if batch.expert is None else batch.expert.to(device),
        entropy=entropy,
        sample_counts=shaping.sample_counts(returns, seed=batch.step_version),
        seed=seed,
    )


def _scored_before(step: PreparedStep, objective: Objective) -> list[int]:
    """The sequences whose log-probabilities must be known before the first update."""
    if not objective.looks_ahead and objective.proximal != "trainer":
        return []
    free = set() if objective.looks_ahead else set(step.first)
    return [i for i, read in enumerate(step.needs_forward) if read and i not in free]
