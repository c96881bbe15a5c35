"""Tiny models with random weights, built in memory: real architectures, for tests without a download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 6}
_LATENT = {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
_LATENT |= {"head_dim": 4}  # what positions rotate
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

_BUILDERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "gemma": (GemmaConfig, GemmaForCausalLM, {}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {**_WINDOWS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, _WINDOWS),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
    "deepseek_v2": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {**_LATENT, **_ROUTED, **_EXPERTS, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, {**_LATENT, **_ROUTED, **_EXPERTS}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**_EXPERTS, "num_experts": 4}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
FAMILIES = tuple(_BUILDERS)
"""Names that `tiny_model` knows."""
EXPERTS = ("deepseek_v2", "deepseek_v3", "qwen2_moe", "qwen3_moe", "mixtral")
"""Those whose tokens are routed to experts."""


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
        family: One of `FAMILIES`; those of Gemma 2 and 3 and Mistral have sliding windows, Gemma 2 caps scores and
            logits, those of DeepSeek have latent attention.
        vocab_size: Entries of the vocabulary.
        layers: Decoder layers (``gemma2`` and ``gemma3``: 2).
        hidden_size: Width; the feed-forward part is twice as wide.
        heads: Query heads; the head size is ``hidden_size / heads``.
        kv_heads: Key-value heads.
        max_context: Longest sequence.
        tied: Whether the output head shares the embedding.
        initializer_range: Standard deviation of the weights; large enough here for distributions that are not flat.
        seed: Decides the weights; torch's global generator is left as it was.
    """
    config_type, model_type, extra = _BUILDERS[family]
    common = {
        "vocab_size": vocab_size,
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family.startswith("deepseek") else kv_heads,
        "head_dim": hidden_size // heads,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": tied,
        "initializer_range": initializer_range,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    config = config_type(**common | extra)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = model_type(config)
    return model.eval()
