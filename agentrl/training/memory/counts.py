"""How many parameters a model has, from its config alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from agentrl.config.lora import LoraConfig
from agentrl.config.schema import ModelConfig, ScratchModelConfig
from agentrl.config.trained_size import TrainedSize
from agentrl.errors import UsageError
from agentrl.training.models.scratch import scratch_model_config
from agentrl.vision_model import MODEL_TYPES


def model_config(model: ModelConfig) -> Any:
    """What transformers knows of a model before its weights are read.

    Raises:
        UsageError: there is no config of the model, or it is not of a kind that transformers knows.
    """
    if model.path == "scratch":
        scratch = model.scratch or ScratchModelConfig()
        return scratch_model_config(scratch, vocab_size=scratch.vocab_size)
    try:
        return AutoConfig.from_pretrained(Path(model.path) if Path(model.path).is_dir() else model.path)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"cannot read the config of {model.path}",
            got=str(error).strip().splitlines()[0],
            expected="a Hugging Face model folder with a config.json, or a name on the hub that can be reached",
        ) from error


def _kind(config: Any) -> Any:
    return AutoModelForImageTextToText if config.model_type in MODEL_TYPES else AutoModelForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of a model's parameters."""

    all: int
    in_layers: int
    trained: TrainedSize


def counts(model: ModelConfig) -> Counts:
    """Count a model's parameters, by its ``config.json``.

    Raises:
        UsageError: see `model_config`.
    """
    return counts_of(model_config(model), model.lora)


def counts_of(config: Any, lora: LoraConfig | None) -> Counts:
    """Count the parameters of what transformers would make of a config."""
    with torch.device("meta"):
        model = _kind(config).from_config(config)
    layers = (child for child in model.modules() if isinstance(child, torch.nn.ModuleList))
    in_layers = {id(p): p.numel() for layer in layers for p in layer.parameters()}
    every = sum(p.numel() for p in model.parameters())
    trained = TrainedSize(own=every) if lora is None else _trained(model, lora)
    return Counts(all=every, in_layers=sum(in_layers.values()), trained=trained)


def _trained(model: Any, lora: LoraConfig) -> TrainedSize:
    """What `agentrl.training.models.lora.add_adapters` would train."""
    named, head = dict(model.named_modules()), model.get_output_embeddings()
    matrices = [
        module
        for name, module in named.items()
        if isinstance(module, torch.nn.Linear)
        and (module is not head if lora.targets == "all-linear" else _ends_with(name, lora.targets))
    ]
    own = {id(p): p.numel() for name, m in named.items() if _ends_with(name, lora.whole) for p in m.parameters()}
    adapters = lora.rank * sum(matrix.in_features + matrix.out_features for matrix in matrices)
    return TrainedSize(adapters=adapters, own=sum(own.values()))


def _ends_with(name: str, ends: Sequence[str]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)
