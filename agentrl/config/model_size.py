"""How large a decoder model is, from its sizes alone: no weights and no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.lora import LoraConfig
from agentrl.config.schema import ModelConfig, ScratchModelConfig

FEED_FORWARD_RATIO = 3
"""Width of the feed-forward layers over the hidden size in a scratch model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes that decide parameters and memory of a Llama-like decoder."""

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
        """Number of weights: embedding, per layer attention and a gated feed-forward; norms and biases left out."""
        return self.trunk_parameters + (0 if self.tied else self.vocab_size * self.hidden_size)

    @property
    def trunk_parameters(self) -> int:
        """Those that give hidden states: all but an output head that is no embedding."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        feed_forward = 3 * self.hidden_size * self.feed_forward_size
        return self.vocab_size * self.hidden_size + self.layers * (attention + feed_forward)

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Number of weights of adapters, modules that are trained whole left out."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ends = {
            **dict.fromkeys(("q_proj", "o_proj"), self.hidden_size + query),
            **dict.fromkeys(("k_proj", "v_proj"), self.hidden_size + key),
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.hidden_size + self.feed_forward_size),
        }
        named = {target.rpartition(".")[2] for target in lora.targets}
        taken = ends if lora.targets == "all-linear" else [end for end in ends if end in named]
        return self.layers * lora.rank * sum(ends[end] for end in taken)

    @property
    def cache_values_per_token(self) -> int:
        """Numbers that the key-value cache keeps for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def model_size(config: ModelConfig) -> ModelSize | None:
    """The sizes of the configured model; ``None`` when they are not on this machine."""
    if config.path == "scratch":
        return _scratch_size(config.scratch or ScratchModelConfig())
    file = Path(config.path) / "config.json"
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
