"""Gradient norms by kind of parameter: where in a model a norm comes from."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from agentrl.training.ranks.sharding import total_norm

OTHER = "other"
"""The group of parameters whose names say nothing."""


def group_of(name: str) -> str:
    """The group of a parameter, by its name.

    >>> group_of("model.layers.0.self_attn.q_proj.weight"), group_of("model.layers.0.self_attn.q_norm.weight")
    ('attention', 'norms')
    >>> group_of("model.layers.3.mlp.experts.2.up_proj.weight"), group_of("model.embed_tokens.weight")
    ('mlp', 'embeddings')
    """
    words = name.lower().split(".")
    module = words[-2] if len(words) > 1 else words[-1]
    if any(word.startswith("lora") for word in words):
        return "adapters"
    if "visual" in words or "vision_tower" in words:
        return "vision"
    if "norm" in module or module.startswith("ln_"):
        return "norms"
    if any("attn" in word or "attention" in word for word in words):
        return "attention"
    if any(word in ("mlp", "ffn", "feed_forward", "experts", "block_sparse_moe") for word in words):
        return "mlp"
    if any(word.startswith("embed_") or word in ("wte", "wpe", "embeddings") for word in words):
        return "embeddings"
    return "head" if module in ("lm_head", "embed_out", "score", "value_head") else OTHER


def group_norms(gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """2-norm of the gradients of each group, by the names of the parameters; all ranks must ask for it."""
    members: dict[str, list[torch.Tensor]] = {}
    for name, gradient in gradients.items():
        members.setdefault(group_of(name), []).append(gradient)
    return {group: total_norm(own) for group, own in members.items()}
