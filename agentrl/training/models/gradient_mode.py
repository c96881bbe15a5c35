"""Gradient checkpointing for the duration of a training step: what is kept of a forward pass, and where.

mode         kept of a layer                            computed again in the backward pass
full         its input                                  everything
selective    its input, and what attention gave         everything but attention
offload      its input, in the CPU's memory             everything
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
from transformers import PreTrainedModel

from agentrl.config.schema import Checkpointing
from agentrl.training.scoring.tree_attention import has_flash

_ATEN = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
)
"""Attention as torch computes it; what grows with the square of the length."""
_FUNCTION = "_gradient_checkpointing_func"
"""What transformers calls in place of a layer."""


@contextmanager
def gradients_recomputed(model: PreTrainedModel, *, enabled: bool | Checkpointing) -> Iterator[None]:
    """Recompute activations in backward passes inside the block, if `enabled`; the model is left in `eval` mode.

    Layers recompute only in training mode. Dropout is off in models that `load_model` gives, so that the mode changes
    no number.

    Args:
        model: As `load_model` gives it.
        enabled: A mode; ``True`` is ``full``.
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
