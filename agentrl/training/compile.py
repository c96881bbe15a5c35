"""Faster and smaller passes of a model: Liger kernels, torch.compile and gradient checkpointing.

Liger's kernels (https://arxiv.org/abs/2410.10989) replace a model's norms, rotary embeddings and feed-forward parts.
The output head remains agentrl's own, which never makes a tensor of [tokens, vocabulary]. Liger also patches models of
the same type that this process makes later.
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
"""Liger's own losses, which would replace agentrl's output head."""
BACKEND = "inductor"
_ATEN = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
)
"""Torch's attention operators, whose cost grows with the square of the length."""
_FUNCTION = "_gradient_checkpointing_func"


def use_liger(model: PreTrainedModel) -> None:
    """Replace parts of a model by Liger's kernels; weights and their names do not change.

    Raises:
        ConfigError: the model is not on a GPU, or Liger has no kernels for its type.
        UsageError: the extra is not installed.
    """
    if model.device.type != "cuda":
        raise ConfigError(
            "trainer.kernels=liger needs a GPU",
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


def compile_layers(model: PreTrainedModel, config: TrainerConfig, *, backend: str = BACKEND) -> None:
    """Apply ``trainer.kernels``: Liger's kernels, or compilation of a model's layers at their first call.

    Weights and their names do not change. Attention over packed rows is not compiled, which splits a layer in two. With
    gradient checkpointing, the parts of layers are compiled instead of whole layers, so that this split lies within the
    checkpointed function.
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


@contextmanager
def checkpoint_activations(model: PreTrainedModel, *, enabled: bool | Checkpointing) -> Iterator[None]:
    """Recompute activations in backward passes in this block, if `enabled`; leave the model in `eval` mode.

    Layers recompute only in training mode. Models from `load_model` have no dropout, so the mode does not change
    results.
    """
    if not enabled:
        yield
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if enabled == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy(_saved_operators()))
    _switch(model, "enable")(options)
    if enabled == "offload":
        _offload_activations(model)
    model.train()
    try:
        yield
    finally:
        model.eval()
        _switch(model, "disable")()


def _switch(model: PreTrainedModel, verb: str) -> Callable[..., None]:
    """Return the method that enables or disables checkpointing; its name differs between transformers 4 and 5."""
    name = f"activation_checkpointing_{verb}"
    switch: Callable[..., None] = getattr(model, name if hasattr(model, name) else f"gradient_checkpointing_{verb}")
    return switch


def _saved_operators() -> frozenset[Any]:
    """Find the operators whose results are saved: those of attention that torch and the installed kernels have."""
    if has_flash(torch.bfloat16):
        importlib.import_module("flash_attn")
    aten = [getattr(getattr(torch.ops.aten, name, None), "default", None) for name in _ATEN]
    packed = getattr(getattr(torch.ops, "flash_attn", None), "_flash_attn_varlen_forward", None)
    flex = getattr(torch.ops.higher_order, "flex_attention", None)
    return frozenset(found for found in (*aten, getattr(packed, "default", None), flex) if found is not None)


def _policy(saved: frozenset[Any]) -> Callable[..., CheckpointPolicy]:
    def decide(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _offload_activations(model: PreTrainedModel) -> None:
    """Keep the activations that layers save for the backward pass in the CPU's memory."""
    pinned = model.device.type == "cuda"
    for module in model.modules():
        if hasattr(module, _FUNCTION):
            setattr(module, _FUNCTION, functools.partial(_checkpoint_on_cpu, getattr(module, _FUNCTION), pinned))


def _checkpoint_on_cpu(checkpoint: Callable[..., Any], pinned: bool, *arguments: Any, **options: Any) -> Any:
    with save_on_cpu(pin_memory=pinned):
        return checkpoint(*arguments, **options)
