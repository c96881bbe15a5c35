"""Model properties that determine whether several sequences can be packed into one row of tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

PACKED_LAYERS = ("full_attention", "sliding_attention")
"""Layer types in which tokens depend on each other only through full or sliding-window attention."""
BATCH_DEPENDENT = ("dynamic", "longrope")
"""Rotary scaling types that depend on the longest sequence of a forward pass."""
_WINDOW = 4


def layer_obstacle(model: PreTrainedModel) -> str | None:
    """Return the reason why packed sequences would affect each other in the model's layers, if there is one."""
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention cannot be replaced"
    if other := set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - set(PACKED_LAYERS):
        return f"layers of {', '.join(sorted(other))}"
    return None


def batch_dependent_rope(config: PretrainedConfig) -> str | None:
    """Return the type of the model's rotary scaling if it depends on the batch."""
    return next((kind for kind in _scalings(config) if kind in BATCH_DEPENDENT), None)


def fixed_length(config: PretrainedConfig) -> int | None:
    """Return the maximum length at which sequences keep the rotary positions of others; ``None`` for any."""
    scalings, text = _scalings(config), config.get_text_config()
    limits = [int(text.max_position_embeddings)] if "dynamic" in scalings else []
    if own := scalings.get("longrope"):
        limits.append(int(own.get("original_max_position_embeddings", text.max_position_embeddings)))
    return min(limits, default=None)


def _scalings(config: PretrainedConfig) -> dict[str | None, dict[str, Any]]:
    """Return the parameters of each type of rotary scaling in a model, some of which differ by the type of layer."""
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    parts = [found, *(part for part in found.values() if isinstance(part, dict))]
    return {part.get("rope_type"): part for part in parts}


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shorten sliding windows to a few tokens, so that they are shorter than the test sequences.

    Windows that cover the longest sequence are not changed.
    """
    text, modules = model.config.get_text_config(), list(model.modules())
    configs = {id(config): config for m in modules if (config := getattr(m, "config", None)) is not None}
    holders: dict[int, Any] = {id(text): text, **configs, **{id(module): module for module in modules}}
    windows = [(holder, vars(holder).get("sliding_window")) for holder in holders.values()]
    longest = getattr(text, "max_position_embeddings", sys.maxsize)
    before = [(holder, window) for holder, window in windows if type(window) is int and window < longest]
    try:
        for holder, _ in before:
            holder.sliding_window = _WINDOW
        yield
    finally:
        for holder, window in before:
            holder.sliding_window = window
