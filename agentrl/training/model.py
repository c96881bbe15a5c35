"""Loading a causal language model to train, with or without eyes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging as transformers_logging

from agentrl.errors import UsageError
from agentrl.vision_model import MODEL_TYPES

LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config keys of models whose logits are not simply the head's output; log-probabilities here would be wrong."""


def load_model(path: str | Path, *, dtype: Literal["float32", "bfloat16"], device: str = "auto") -> PreTrainedModel:
    """A Hugging Face causal language model with dropout off, so that two forward passes agree.

    Args:
        path: A folder, or a name on the Hugging Face hub.
        dtype: Number format of the weights.
        device: ``cpu``, ``cuda``, ``cuda:1``; ``auto`` takes a GPU when there is one.

    Raises:
        UsageError: no such folder or name, not a causal language model, or a device that is not there.
    """
    with _loading(path):
        target, config = _device(device), _config(path)
        model: PreTrainedModel = _kind(config).from_pretrained(
            path, config=config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    return _prepared(path, model).to(target)


def make_model(path: str | Path) -> PreTrainedModel:
    """The model that `load_model` loads, in float32 and with whatever values its parameters begin with.

    Raises:
        UsageError: as `load_model`.
    """
    with _loading(path):
        config = _config(path)
        model: PreTrainedModel = _kind(config).from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return _prepared(path, model)


@contextmanager
def _loading(path: str | Path) -> Iterator[None]:
    _check_folder(path)
    transformers_logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            "cannot load the model",
            got=f"{path} ({str(error).strip().splitlines()[0]})",
            expected="a folder with a Hugging Face causal language model, or a name on the hub that can be reached",
        ) from error


def _config(path: str | Path) -> Any:
    return AutoConfig.from_pretrained(path, attention_dropout=0.0)


def _kind(config: Any) -> Any:
    return AutoModelForImageTextToText if config.model_type in MODEL_TYPES else AutoModelForCausalLM


def _prepared(path: str | Path, model: PreTrainedModel) -> PreTrainedModel:
    _check_logits(path, model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.eval()


def _check_folder(path: str | Path) -> None:
    folder = Path(path)
    looks_local = isinstance(path, Path) or folder.is_absolute() or str(path).startswith(".") or folder.exists()
    if not looks_local:
        return
    if not folder.is_dir():
        raise UsageError("there is no such model folder", got=folder, hint="check model.path")
    if not (folder / "config.json").is_file():
        raise UsageError("the folder holds no model", got=folder, expected="a config.json and weights in it")


def _check_logits(path: str | Path, model: PreTrainedModel) -> None:
    for key in LOGIT_CHANGES:
        value = getattr(model.config.get_text_config(), key, None)
        if value not in (None, 1, 1.0):
            raise UsageError("this model changes its logits after the head", got=f"{path}: {key}={value}")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError("unknown device", got=repr(name), expected="auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            "the device is not there", got=name, expected=f"one of {torch.cuda.device_count()} GPUs, or cpu"
        )
    return device
