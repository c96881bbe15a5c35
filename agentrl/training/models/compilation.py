"""Faster layers: compiled by torch.compile, each on its own, or of Liger's kernels."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from agentrl.config.schema import TrainerConfig
from agentrl.training.models.liger import use_liger
from agentrl.training.ranks.sharding import layers
from agentrl.training.scoring.tree_attention import ATTENTION, tree_attention

BACKEND = "inductor"


def compile_layers(model: PreTrainedModel, config: TrainerConfig, *, backend: str = BACKEND) -> None:
    """Let a model's layers be compiled when they first compute, if the config says so; names and weights stay. Liger's
    kernels, if the config says so, come first.

    Attention over packed rows is left as it is, which splits a layer in two. Where layers are computed again in the
    backward pass, their parts are compiled instead of them: the split must lie within what is checkpointed.

    Args:
        model: Changed in place.
        config: Says whether, and whether layers are computed again.
        backend: Of torch.compile.
    """
    if config.kernels == "liger":
        use_liger(model)
    if config.kernels != "compiled":
        return
    disable: Any = torch.compiler.disable
    AttentionInterface.register(ATTENTION, disable(tree_attention))
    for layer in layers(model):
        parts: list[Any] = list(layer.children()) if config.gradient_checkpointing else [layer]
        for part in parts:
            part.compile(backend=backend, dynamic=True)
