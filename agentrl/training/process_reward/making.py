"""A trainer's implicit process reward model."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from transformers import PreTrainedModel

from agentrl.config.schema import TrainerConfig
from agentrl.training.critic.checks import check_vocabulary
from agentrl.training.models.compilation import compile_layers
from agentrl.training.models.lora import base_is_reference
from agentrl.training.optimizer_settings import OptimizerSettings
from agentrl.training.passes import Passes
from agentrl.training.process_reward.model import ProcessRewardModel
from agentrl.training.scoring.scorer import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessModels:
    """The models of an implicit process reward."""

    trained: PreTrainedModel
    start: PreTrainedModel | None = None
    """The same, frozen; not needed where `trained` without its adapters is that."""


def make_process_reward(
    policy: PreTrainedModel,
    models: ProcessModels | None,
    config: TrainerConfig,
    settings: OptimizerSettings,
    passes: Passes,
) -> ProcessRewardModel | None:
    """The implicit process reward model that a config asks for, if it does.

    Args:
        policy: Whose tokens it reads.
        models: Copies of the policy when left out.
        config: Numbers.
        settings: Of an optimizer.
        passes: Of the policy.

    Raises:
        UsageError: the model has another vocabulary, or cannot share prefixes.
    """
    if config.process_reward is None:
        return None
    model = copy.deepcopy(policy) if models is None else models.trained
    check_vocabulary(model, policy, what="the process reward")
    start = _start(model, None if models is None else models.start, config, passes)
    compile_layers(model, config)
    return ProcessRewardModel(Scorer(model, passes.of(model, config)), start, config.process_reward, settings)


def _start(model: PreTrainedModel, given: PreTrainedModel | None, config: TrainerConfig, passes: Passes) -> Scorer:
    if given is None and base_is_reference(model):
        return Scorer(model, passes.of(model, config), base_only=True)
    start = copy.deepcopy(model).requires_grad_(False).eval() if given is None else given
    return Scorer(start, passes.of(start, config))
