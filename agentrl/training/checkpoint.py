"""Models and training states as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_model_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a Hugging Face folder: config, safetensors, tokenizer with its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_state(state: Mapping[str, Any], path: Path) -> None:
    """Write a state of tensors and plain data, bit for bit."""
    torch.save(dict(state), path)


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote, tensors on the CPU."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
