"""Sizes of models: weights, trained weights, and their bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.config import ModelConfig, ScratchModelConfig
from agentrl.config.trainer import LoraConfig
from agentrl.errors import UsageError
from agentrl.observe.model_folder import find_model

FEED_FORWARD_RATIO = 3
"""Ratio of feed-forward width to hidden size in a scratch model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes that determine parameters and memory of a Llama-like decoder."""

    layers: int
    hidden_size: int
    feed_forward_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool

    @property
    def parameters(self) -> int:
        """Number of weights: embeddings, attention and gated feed-forward layers, without norms and biases."""
        return self.trunk_parameters + (0 if self.tied else self.vocab_size * self.hidden_size)

    @property
    def trunk_parameters(self) -> int:
        """Number of weights without an untied output head."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        feed_forward = 3 * self.hidden_size * self.feed_forward_size
        return self.vocab_size * self.hidden_size + self.layers * (attention + feed_forward)

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Return the number of weights of adapters, without modules that are trained in full."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ends = {
            **dict.fromkeys(("q_proj", "o_proj"), self.hidden_size + query),
            **dict.fromkeys(("k_proj", "v_proj"), self.hidden_size + key),
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.hidden_size + self.feed_forward_size),
        }
        named = {target.rpartition(".")[2] for target in lora.target_modules}
        taken = ends if lora.target_modules == "all-linear" else [end for end in ends if end in named]
        return self.layers * lora.rank * sum(ends[end] for end in taken)

    @property
    def cache_values_per_token(self) -> int:
        """Number of values that the key-value cache holds for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def model_size(config: ModelConfig) -> ModelSize | None:
    """Return the sizes of the configured model; ``None`` if its config.json is not on this machine."""
    if config.path == "scratch":
        return _scratch_size(config.scratch or ScratchModelConfig())
    try:
        file = Path(find_model(config.path)) / "config.json"
    except UsageError:  # the run itself reports it
        return None
    return _folder_size(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def _scratch_size(scratch: ScratchModelConfig) -> ModelSize:
    return ModelSize(
        layers=scratch.layers,
        hidden_size=scratch.hidden_size,
        feed_forward_size=FEED_FORWARD_RATIO * scratch.hidden_size,
        heads=scratch.heads,
        kv_heads=scratch.kv_heads,
        head_dim=scratch.hidden_size // scratch.heads,
        vocab_size=scratch.vocab_size,
        tied=scratch.tie_word_embeddings,
    )


def _folder_size(config: Mapping[str, Any]) -> ModelSize | None:
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if any(key not in config for key in needed):
        return None
    heads = config["num_attention_heads"]
    return ModelSize(
        layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        feed_forward_size=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
    )


FULL_BYTES = 4
"""Bytes of a float32, the format of adapters and logits for every format of the model."""
MOMENT_BYTES = 8
"""Bytes of AdamW's two float32 moments of a weight; Muon keeps one moment for its matrices."""
QUANTIZED_BYTES = 0.52
"""Bytes of a weight in 4 bits, with its share of the scales (https://arxiv.org/abs/2305.14314, section 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSize:
    """Numbers of trained weights."""

    adapters: int = 0
    own: int
    """Trained weights of the model itself: all of them if there are no adapters."""

    @property
    def parameters(self) -> int:
        """Number of all trained weights."""
        return self.adapters + self.own

    def gradient_bytes(self) -> int:
        """Return the bytes of the gradients, which are float32 whatever the weights are."""
        return FULL_BYTES * self.parameters

    def optimizer_bytes(self, width: int) -> int:
        """Return the bytes of AdamW's moments and of the float32 copies of bfloat16 weights."""
        return MOMENT_BYTES * self.parameters + (FULL_BYTES * self.own if width < FULL_BYTES else 0)

    def adapter_bytes(self) -> int:
        """Return the bytes of the adapters' weights."""
        return FULL_BYTES * self.adapters


def trained_size(lora: LoraConfig | None, size: ModelSize, *, parameters: int | None = None) -> TrainedSize:
    """Return the size of the trained part of a Llama-like decoder.

    Args:
        lora: Adapter settings, if any.
        size: Sizes of the model.
        parameters: Number of weights that are trained without adapters; default all.
    """
    if lora is None:
        return TrainedSize(own=size.parameters if parameters is None else parameters)
    ends = {end.rpartition(".")[2] for end in lora.modules_to_save}
    embeddings = len(ends & {"embed_tokens", "lm_head"})
    if size.tied:
        embeddings = min(1, embeddings)
    return TrainedSize(adapters=size.adapter_parameters(lora), own=embeddings * size.vocab_size * size.hidden_size)


def weight_bytes(lora: LoraConfig | None, size: ModelSize, width: int) -> int:
    """Return the bytes of a model's weights, adapters included."""
    adapters = trained_size(lora, size).adapter_bytes()
    if lora is None or lora.quantize is None:
        return size.parameters * width + adapters
    in_layers = size.trunk_parameters - size.vocab_size * size.hidden_size
    return round(in_layers * QUANTIZED_BYTES) + (size.parameters - in_layers) * width + adapters
