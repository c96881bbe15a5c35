"""Tiny models with random weights, built in memory: real architectures, for tests without a download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_BUILDERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "gemma": (GemmaConfig, GemmaForCausalLM, {}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
    ),
}
FAMILIES = tuple(_BUILDERS)
"""Names that `tiny_model` knows."""


def tiny_model(
    family: str = "qwen3",
    *,
    vocab_size: int = 64,
    layers: int = 2,
    hidden_size: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    max_context: int = 512,
    tied: bool = True,
    initializer_range: float = 0.2,
    seed: int = 0,
) -> PreTrainedModel:
    """A decoder-only model of a known family with random weights, float32, in evaluation mode.

    Args:
        family: One of `FAMILIES`; ``gemma3`` has a layer with a sliding window.
        vocab_size: Entries of the vocabulary.
        layers: Decoder layers (``gemma3``: 2).
        hidden_size: Width; the feed-forward part is twice as wide.
        heads: Query heads; the head size is ``hidden_size / heads``.
        kv_heads: Key-value heads.
        max_context: Longest sequence.
        tied: Whether the output head shares the embedding.
        initializer_range: Standard deviation of the weights; large enough here for distributions that are not flat.
        seed: Decides the weights; torch's global generator is left as it was.
    """
    config_type, model_type, extra = _BUILDERS[family]
    config = config_type(
        vocab_size=vocab_size,
        num_hidden_layers=layers,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden_size // heads,
        max_position_embeddings=max_context,
        tie_word_embeddings=tied,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **extra,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = model_type(config)
    return model.eval()
