"""Liger's kernels (https://arxiv.org/abs/2410.10989) in place of a model's norms, rotary positions and feed-forward.

The output head stays agentrl's own, which never makes a tensor of [tokens, vocabulary]. Liger also replaces parts of
models of the same type that are made later in this process.

Layers may also be compiled by torch.compile, and recompute activations in the backward pass (gradient checkpointing).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AttentionInterface, PreTrainedModel

from agentrl.config.config import Checkpointing, TrainerConfig
from agentrl.errors import ConfigError
from agentrl.registry import Extra
from agentrl.training.distributed.fsdp import layers
from agentrl.training.forward.tree_attention import ATTENTION, has_flash, tree_attention

LIGER = Extra(name="gpu", module="liger_kernel")
LEFT_OUT = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Liger's own losses, which would take the place of the head."""


def use_liger(model: PreTrainedModel) -> None:
    """Put Liger's kernels into a model; weights and their names stay.

    Raises:
        ConfigError: the model is not on a GPU, or Liger has no kernels for its type.
        UsageError: the extra is not installed.
    """
    if model.device.type != "cuda":
        raise ConfigError(
            "trainer.kernels liger needs a GPU",
            got=f"a model on {model.device}",
            expected="a model on CUDA or ROCm",
            hint="set trainer.kernels=torch",
        )
    known = LIGER.load("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    if model.config.model_type not in known:
        raise ConfigError(
            "Liger has no kernels for this model",
            got=f"model type {model.config.model_type} with trainer.kernels liger",
            expected=f"one of {', '.join(sorted(known))}",
            hint="set trainer.kernels=torch",
        )
    LIGER.load("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model, **LEFT_OUT)


BACKEND = "inductor"


def compile_layers(model: PreTrainedModel, config: TrainerConfig, *, backend: str = BACKEND) -> None:
    """Let a model's layers be compiled when they first compute, if the config says so; names and weights stay. Liger's
    kernels, if the config says so, come first.

    Attention over packed rows is left as it is, which splits a layer in two. Where layers are computed again in the
    backward pass, their parts are compiled instead of them: the split must lie within what is checkpointed.
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


_ATEN = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
)
"""Attention as torch computes it; what grows with the square of the length."""
_FUNCTION = "_gradient_checkpointing_func"


@contextmanager
def gradients_recomputed(model: PreTrainedModel, *, enabled: bool | Checkpointing) -> Iterator[None]:
    """Recompute activations in backward passes inside the block, if `enabled`; the model is left in `eval` mode.

    Layers recompute only in training mode. Dropout is off in models that `load_model` gives, so that the mode changes
    no number.
    """
    if not enabled:
        yield
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if enabled == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy(_kept()))
    _switch(model, "enable")(options)
    if enabled == "offload":
        _keep_on_cpu(model)
    model.train()
    try:
        yield
    finally:
        model.eval()
        _switch(model, "disable")()


def _switch(model: PreTrainedModel, verb: str) -> Callable[..., None]:
    """Transformers 5 calls it activation checkpointing, transformers 4 gradient checkpointing."""
    name = f"activation_checkpointing_{verb}"
    switch: Callable[..., None] = getattr(model, name if hasattr(model, name) else f"gradient_checkpointing_{verb}")
    return switch


def _kept() -> frozenset[Any]:
    """Operators whose results are kept: attention, where this torch and the installed kernels have it."""
    if has_flash(torch.bfloat16):
        importlib.import_module("flash_attn")
    named = [getattr(getattr(torch.ops.aten, name, None), "default", None) for name in _ATEN]
    packed = getattr(getattr(torch.ops, "flash_attn", None), "_flash_attn_varlen_forward", None)
    flex = getattr(torch.ops.higher_order, "flex_attention", None)
    return frozenset(found for found in (*named, getattr(packed, "default", None), flex) if found is not None)


def _policy(kept: frozenset[Any]) -> Callable[..., CheckpointPolicy]:
    def decide(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _keep_on_cpu(model: PreTrainedModel) -> None:
    """Let what layers keep for the backward pass wait in the CPU's memory."""
    pinned = model.device.type == "cuda"
    for module in model.modules():
        if hasattr(module, _FUNCTION):
            setattr(module, _FUNCTION, functools.partial(_kept_on_cpu, getattr(module, _FUNCTION), pinned))


def _kept_on_cpu(checkpoint: Callable[..., Any], pinned: bool, *arguments: Any, **options: Any) -> Any:
    with save_on_cpu(pin_memory=pinned):
        return checkpoint(*arguments, **options)
