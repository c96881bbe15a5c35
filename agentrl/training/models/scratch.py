"""A complete Hugging Face model folder from nothing: tokenizer, chat template, and a small random Qwen3 model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from agentrl.config.model_size import FEED_FORWARD_RATIO
from agentrl.config.schema import ScratchModelConfig
from agentrl.errors import ConfigError
from agentrl.training.models.scratch_tokenizer import build_scratch_tokenizer


def build_scratch_model(directory: Path, corpus: Iterable[str], config: ScratchModelConfig, *, seed: int) -> None:
    """Write a new model into `directory`: `AutoTokenizer` and `AutoModelForCausalLM` load it.

    Args:
        directory: Created if needed.
        corpus: Texts on which the tokenizer's merges are learnt; their order does not matter for anything else.
        config: Sizes.
        seed: Seed of the weights; equal corpus, config and seed write equal files.

    Raises:
        ConfigError: sizes that do not fit together.
    """
    tokenizer = build_scratch_tokenizer(
        corpus,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        numbered_names=config.numbered_names,
    )
    model_config = _model_config(config, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(model_config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    transformers_logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


def _model_config(config: ScratchModelConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    return scratch_model_config(
        config,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def scratch_model_config(
    config: ScratchModelConfig, *, vocab_size: int, eos_token_id: int | None = None, pad_token_id: int | None = None
) -> Qwen3Config:
    """The sizes of a new model as transformers takes them.

    Args:
        config: Sizes.
        vocab_size: Entries of its vocabulary.
        eos_token_id: Of its tokenizer.
        pad_token_id: Of its tokenizer.

    Raises:
        ConfigError: sizes that do not fit together.
    """
    if config.hidden_size % config.heads or config.heads % config.kv_heads or config.hidden_size // config.heads % 2:
        raise ConfigError(
            "sizes of the scratch model do not fit together",
            got=f"hidden_size {config.hidden_size}, heads {config.heads}, kv_heads {config.kv_heads}",
            expected="heads divides hidden_size into even parts, and kv_heads divides heads",
        )
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=FEED_FORWARD_RATIO * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=config.max_context,
        initializer_range=config.initializer_range,
        tie_word_embeddings=config.tie_word_embeddings,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
