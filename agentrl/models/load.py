"""Loading a causal language model to train, with or without eyes.

Frozen weights may be in 4 bits, for adapters (QLoRA, https://arxiv.org/abs/2305.14314).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from agentrl.config.number_format import cpu_has_bfloat16
from agentrl.errors import ConfigError, UsageError
from agentrl.models.lora import base_of, check_one_model, is_adapter_folder, merged_into
from agentrl.models.memory import keep_freed_memory
from agentrl.models.products import use_fast_products
from agentrl.models.vision import MODEL_TYPES
from agentrl.registry import Extra

_log = logging.getLogger(__name__)
BITSANDBYTES = Extra(name="qlora", module="bitsandbytes")


def _quantized_loading(quantize: Literal["nf4"], *, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Give the arguments of ``from_pretrained`` that load a model in 4 bits."""
    if device.type != "cuda":
        raise ConfigError(
            "model.lora.quantize needs a GPU",
            got=f"model.device {device.type}",
            expected="cuda",
            hint="leave model.lora.quantize out: adapters train on the CPU without it",
        )
    BITSANDBYTES.load()
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantize,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": settings, "device_map": {"": device}}


LOGIT_CHANGES = ("logit_scale", "logits_scaling")
"""Config keys of models that change the head's output in a way unknown here; log-probabilities would be wrong."""

SHOWN = 4


def load_model(
    path: str | Path,
    *,
    dtype: Literal["float32", "bfloat16"],
    device: str = "auto",
    quantize: Literal["nf4"] | None = None,
) -> PreTrainedModel:
    """A Hugging Face causal language model with dropout off, so that two forward passes agree.

    Args:
        path: A folder, or a name on the Hugging Face hub. An adapter's folder gives its base with the adapter merged.
        dtype: Number format of the weights.
        device: ``cpu``, ``cuda``, ``cuda:1``; ``auto`` takes a GPU when there is one.
        quantize: Keep the weights in 4 bits, for adapters.

    Raises:
        ConfigError: weights in 4 bits on another device than a GPU.
        UsageError: no such folder or name, not a causal language model, or a device that is not there.
    """
    if is_adapter_folder(path):
        return merged_into(load_model(base_of(path), dtype=dtype, device=device), path)
    check_one_model(path)
    target = _device(device)
    if dtype == "bfloat16" and target.type == "cpu" and not cpu_has_bfloat16():
        _warn_of_slow_products()
    format_ = getattr(torch, dtype)
    options = {} if quantize is None else _quantized_loading(quantize, dtype=format_, device=target)
    with _loading(path):
        config = _config(path)
        with silence_load_reports():
            loaded, told = model_class(config).from_pretrained(
                path,
                config=config,
                dtype=format_,
                attn_implementation=_attention(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused here, with their names
                **options,
            )
    check_complete(path, told)
    model = _prepared(path, loaded)
    return model if options else model.to(target)


@functools.cache
def _warn_of_slow_products() -> None:
    _log.warning(
        "this processor has no instructions for bfloat16: products may take fifty times as long as in float32; "
        "model.dtype=auto takes the faster format"
    )


def make_model(path: str | Path) -> PreTrainedModel:
    """The model that `load_model` loads, in float32 and with whatever values its parameters begin with."""
    with _loading(path):
        config = _config(path)
        model: PreTrainedModel = model_class(config).from_config(
            config, dtype=torch.float32, attn_implementation=_attention(config)
        )
    return _prepared(path, model)


@contextmanager
def silence_load_reports() -> Iterator[None]:
    """Inside the block transformers writes no table of what a file lacks: `check_complete` says that."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def check_complete(path: str | Path, told: Mapping[str, Any], *, new: tuple[str, ...] = ()) -> None:
    """Check that every tensor of a model came from its files (`told` is transformers' loading info), but for new ones.

    The others have random values; names of tensors that may be new begin with one of `new`.
    """
    resized = {name: f"{name} of shape {list(found)}, not {list(own)}" for name, found, own in told["mismatched_keys"]}
    absent = sorted({*told["missing_keys"], *resized})
    wrong = [resized.get(name, f"no {name}") for name in absent if not name.startswith(new)]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise UsageError(
            f"the files of the model {path} do not hold all of its weights",
            got=f"{', '.join(wrong[:SHOWN])}{more}",
            expected="all that its config.json asks for",
            hint="copy or download it again; weights that are missing would be random",
        )


@contextmanager
def _loading(path: str | Path) -> Iterator[None]:
    _check_folder(path)
    transformers_logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UsageError(
            "cannot load the model",
            got=f"{path} ({str(error).strip().splitlines()[0]})",
            expected="a folder with a Hugging Face causal language model, or a name on the hub that can be reached",
        ) from error


def _config(path: str | Path) -> Any:
    return AutoConfig.from_pretrained(path, attention_dropout=0.0)


def model_class(config: Any) -> Any:
    """Choose the class of transformers that makes the model of a config."""
    return AutoModelForImageTextToText if config.model_type in MODEL_TYPES else AutoModelForCausalLM


def _attention(config: Any) -> str:
    """SDPA, which cannot cap scores: models that do compute them one by one."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else "sdpa"


def _prepared(path: str | Path, model: PreTrainedModel) -> PreTrainedModel:
    _check_logits(path, model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "jitter_noise"):  # of a router, in training mode
            module.jitter_noise = 0.0
    use_fast_products(model)
    if model.device.type == "cpu":
        keep_freed_memory()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A GPU as torch sees it."""

    device: str
    name: str
    memory_bytes: int


def accelerators() -> list[Accelerator]:
    """The GPUs that torch can use; empty on a machine without, or with a torch built for the CPU."""
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        Accelerator(device=f"cuda:{index}", name=found.name, memory_bytes=found.total_memory)
        for index, found in enumerate(properties)
    ]


def torch_build() -> str:
    """Torch's version and what it was built for, for example ``2.9.1 for CUDA 12.8``."""
    cuda = torch.version.cuda
    return f"{torch.__version__} for {f'CUDA {cuda}' if cuda else 'the CPU'}"


def use_gpu(position: int) -> None:
    """Let ``cuda`` mean the GPU of this position among those that the process may use, where there are some."""
    if torch.cuda.is_available():
        torch.cuda.set_device(position)
