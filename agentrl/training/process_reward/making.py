"""A trainer's implicit process reward model."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from transformers import PreTrainedModel

from agentrl.config.schema import TrainerConfig
from agentrl.image import ImageReader
from agentrl.lanes import Lanes
from agentrl.training.critic.checks import check_vocabulary
from agentrl.training.critic.critic import CriticPasses
from agentrl.training.models.compilation import compile_layers
from agentrl.training.models.lora import base_is_reference
from agentrl.training.optimizer import OptimizerSettings
from agentrl.training.process_reward.model import FrozenStart, ProcessRewardModel
from agentrl.training.ranks import Ranks
from agentrl.training.scoring.layout import choose_layout


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
    *,
    lanes: Lanes,
    ranks: Ranks,
    reader: ImageReader | None,
) -> ProcessRewardModel | None:
    """The implicit process reward model that a config asks for, if it does.

    Args:
        policy: Whose tokens it reads.
        models: Copies of the policy when left out.
        config: Numbers.
        settings: Of an optimizer.
        lanes: Compute the passes.
        ranks: Share them out.
        reader: Prepares images.

    Raises:
        UsageError: the model has another vocabulary, or cannot share prefixes.
    """
    if config.process_reward is None:
        return None
    model = copy.deepcopy(policy) if models is None else models.trained
    start = None if models is None else models.start
    if start is None:
        start = model if base_is_reference(model) else copy.deepcopy(model).requires_grad_(False).eval()
    check_vocabulary(model, policy, what="the process reward")
    compile_layers(model, config)
    layout = choose_layout(model, config, ranks)
    passes = CriticPasses(
        layout=layout,
        lanes=lanes,
        ranks=ranks,
        reader=reader,
        every_time=config.fsdp.reduce,
        recompute=config.gradient_checkpointing,
    )
    frozen = FrozenStart(model=start, layout=layout if start is model else choose_layout(start, config, ranks))
    return ProcessRewardModel(model, frozen, config.process_reward, settings, passes)
