"""What losses read of a step's sampled tokens."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from agentrl.training.objective import Objective
from agentrl.training.scoring.scorer import Scorer
from agentrl.training.step.prepared import PreparedStep
from agentrl.training.step.rewards import RewardShaping


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """What is known about a step's sampled tokens besides the batch, on the model's device; float32 [tokens] each."""

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
    draws: torch.Tensor | None = None
    """How often each trajectory was drawn: int64 [trajectories], on the CPU; once when left out."""
    seed: int = 0
    """Of the run."""

    def draw(self, update: int) -> int:
        """Seed of random choices in an update of the step, counted from 0: in [0, 2^63)."""
        return random.Random(f"{self.seed} {self.step_version} {update}").getrandbits(63)


def token_values(
    step: PreparedStep, objective: Objective, policy: Scorer, shaping: RewardShaping, *, version: int, seed: int
) -> TokenValues:
    """Gather the values, and score pi_old where the first update's forward pass cannot give it.

    Args:
        step: Whose tokens they are.
        objective: The algorithm.
        policy: As it is before the first update.
        shaping: May draw the trajectories anew.
        version: Of the policy's weights.
        seed: Of the run.
    """
    batch, device, teacher = step.batch, policy.model.device, step.frozen.teacher
    returns = batch.episodes.returns
    trainer_logp = torch.full((batch.tokens,), math.nan, device=device)
    entropy = torch.full_like(trainer_logp, math.nan) if objective.looks_ahead else None
    if needed := _scored_before(step, objective):
        sequences = [batch.sequences[i] for i in needed]
        scores = policy.scores(sequences, temperature=step.given.temperature, pad_id=step.given.pad_id)
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
        step_version=version,
        reference_logp=step.frozen.reference,
        teacher_logp=None if teacher is None else teacher.logp,
        teacher_top_ids=None if teacher is None else teacher.top_ids,
        teacher_top_logp=None if teacher is None else teacher.top_logp,
        expert=_expert(step, objective, device),
        entropy=entropy,
        draws=shaping.draws(returns, seed=version),
        seed=seed,
    )


def _scored_before(step: PreparedStep, objective: Objective) -> list[int]:
    """The sequences whose log-probabilities must be known before the first update."""
    if not objective.looks_ahead and objective.proximal != "trainer":
        return []
    free = set() if objective.looks_ahead else set(step.first)
    return [i for i, read in enumerate(step.reads) if read and i not in free]


def _expert(step: PreparedStep, objective: Objective, device: torch.device) -> torch.Tensor | None:
    """Which tokens an expert wrote, who may have shown nothing in this step."""
    if step.batch.expert is not None:
        return step.batch.expert.to(device)
    return torch.zeros(step.batch.tokens, dtype=torch.bool, device=device) if objective.uses_expert else None
