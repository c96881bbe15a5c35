"""Tiny vision-language models with random weights and their image processors: real architectures, no download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agentrl.render.images import ImageProcessor
from support.tokenizers import build_tokenizer

_Make = tuple[Callable[..., Any], Callable[..., Any], int, dict[str, Any], dict[str, Any]]
_FAMILIES: dict[str, _Make] = {
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        14,
        {"mrope_section": [1, 1, 2]},
        {"window_size": 56, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        16,
        {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
        {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    ),
}
FAMILIES = tuple(_FAMILIES)
"""Names that the functions here know; both families have the structure of Qwen2.5-VL's tokenizer here."""
MAX_SIDE = 6
"""Tokens of the largest square image that is not made smaller."""


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with the added tokens and the template of Qwen2.5-VL."""
    return build_tokenizer("qwen2.5-vl")


def vision_processor(family: str, tokenizer: PreTrainedTokenizerFast) -> ImageProcessor:
    """The image processor of a family, for images of few tokens."""
    patch = _FAMILIES[family][2]
    token = (2 * patch) ** 2
    size = {"shortest_edge": token, "longest_edge": MAX_SIDE**2 * token}
    processor = Qwen2VLImageProcessorPil(size=size, patch_size=patch)
    return ImageProcessor(processor, pad_id=int(tokenizer.convert_tokens_to_ids("<|image_pad|>")))


def vision_model(
    family: str, tokenizer: PreTrainedTokenizerFast, *, max_context: int = 1024, head_size: int = 8, seed: int = 0
) -> PreTrainedModel:
    """A model of a family with random weights, float32, in evaluation mode.

    Args:
        family: One of `FAMILIES`.
        tokenizer: Of `vision_tokenizer`.
        max_context: Longest sequence.
        head_size: Width of an attention head, a multiple of 8; vLLM's kernels for CPUs need at least 32.
        seed: Decides the weights; torch's global generator is left as it was.
    """
    config_type, model_type, patch, rope, vision = _FAMILIES[family]
    width = {"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.2}
    rope = rope | {"mrope_section": [head_size // 8 * part for part in rope["mrope_section"]]}
    text: dict[str, Any] = {
        **width,
        "hidden_size": 4 * head_size,
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_context,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
        **({"head_dim": head_size} if family == "qwen3_vl" else {}),
    }
    config = config_type(
        text_config=text,
        vision_config={
            **width,
            "depth": 2,
            "num_heads": 2,
            "patch_size": patch,
            "out_hidden_size": 4 * head_size,
            **vision,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = model_type(config)
    return model.eval()


def save_vision_model(family: str, folder: Path, *, max_context: int = 1024, head_size: int = 8, seed: int = 0) -> None:
    """Write model, tokenizer and image processor into a folder."""
    tokenizer = vision_tokenizer()
    model = vision_model(family, tokenizer, max_context=max_context, head_size=head_size, seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    vision_processor(family, tokenizer).processor.save_pretrained(folder)
