"""A trainer's critic, and its part in a step."""

from __future__ import annotations

import copy
import dataclasses

from transformers import PreTrainedModel

from agentrl.algorithms.episodes import Estimate
from agentrl.config.schema import TrainerConfig
from agentrl.errors import TrainingError
from agentrl.training.critic.checks import check_vocabulary
from agentrl.training.critic.critic import Critic
from agentrl.training.critic.step import CriticStep
from agentrl.training.critic.targets import ValueTargets
from agentrl.training.models.compilation import compile_layers
from agentrl.training.optimizer_settings import OptimizerSettings
from agentrl.training.passes import Passes
from agentrl.training.step.batch import StepBatch


def make_critic(
    policy: PreTrainedModel,
    own: PreTrainedModel | None,
    config: TrainerConfig,
    settings: OptimizerSettings,
    passes: Passes,
) -> Critic | None:
    """The critic that a config asks for, if it does.

    Args:
        policy: Whose tokens it reads.
        own: The model of a critic of its own; a copy of the policy when left out.
        config: Kind and sizes.
        settings: Of an optimizer.
        passes: Of the policy.

    Raises:
        UsageError: the model has another vocabulary, or cannot share prefixes.
    """
    if config.critic is None:
        return None
    trunk = policy
    if config.critic.kind == "own":
        trunk = copy.deepcopy(policy) if own is None else own
        check_vocabulary(trunk, policy)
        compile_layers(trunk, config)
        passes = passes.of(trunk, config)
    return Critic(trunk, config.critic, settings, passes)


def with_values(batch: StepBatch, critic: Critic | None, pad_id: int) -> StepBatch:
    """The batch with a critic's values in its episodes, if there is one."""
    if critic is None:
        return batch
    values = critic.values(batch.sequences, pad_id).cpu().double()
    return dataclasses.replace(batch, episodes=dataclasses.replace(batch.episodes, values=values))


def critic_step(
    critic: Critic | None, batch: StepBatch, estimate: Estimate, pad_id: int, *, policy_learns: bool
) -> CriticStep | None:
    """What a critic does in a step whose batch has its values, if there is one.

    Raises:
        TrainingError: the estimator, a user's own, says nothing that a critic could learn.
    """
    if critic is None or batch.episodes.values is None:
        return None
    if estimate.value_target is None:
        raise TrainingError(
            "the advantage estimator gives the critic nothing to learn",
            got="advantages only",
            expected="an agentrl.algorithms.episodes.Estimate with a value_target",
        )
    device = critic.trunk.device
    targets = ValueTargets(
        old_values=batch.episodes.values.float().to(device),
        targets=estimate.value_target.to(device),
        clip=critic.config.clip,
    )
    return CriticStep(critic, batch, targets, pad_id, policy_learns=policy_learns)
