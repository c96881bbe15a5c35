"""How far a step's tokens are from a reference or a teacher, as a part of their rewards."""

from __future__ import annotations

import dataclasses

import torch

from agentrl.training.scoring.top_tokens import TokenOpinions
from agentrl.training.step.batch import StepBatch
from agentrl.training.step.rewards import RewardShaping


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


def with_teacher_reward(batch: StepBatch, shaping: RewardShaping, teacher: TokenOpinions | None) -> StepBatch:
    """The batch with the divergence from a teacher in its rewards, if the algorithm wants that; an expert's tokens have
    none.
    """
    if shaping.distill is None or teacher is None:
        return batch
    penalty = shaping.distill.penalty(batch.behaviour_logp, teacher.logp.cpu())
    if batch.expert is not None:
        penalty = penalty.masked_fill(batch.expert, 0.0)
    return dataclasses.replace(batch, episodes=batch.episodes.with_token_reward(penalty))
