"""Loading of causal language models and vision-language models for training.

With adapters, the frozen weights may be in 4 bits (QLoRA, https://arxiv.org/abs/2305.14314).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
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
from agentrl.models.lora import check_one_model, find_base, is_adapter_folder, merge_adapter
from agentrl.models.matrix_products import use_fast_products
from agentrl.models.memory import keep_freed_memory
from agentrl.models.vision import MODEL_TYPES
from agentrl.registry import Extra

_log = logging.getLogger(__name__)
BITSANDBYTES = Extra(name="qlora", module="bitsandbytes")
LISTED_TENSORS = 4
"""Maximum number of missing tensors that an error names."""
_TOKENS = 3
_TOLERANCE = 0.02
"""Tolerance for logits between -5 and 5 that are rounded to bfloat16."""


def _quantization_options(quantize: Literal["nf4"], *, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that load a model in 4 bits."""
    if device.type != "cuda":
        raise ConfigError(
            "model.lora.quantize needs a GPU",
            got=f"model.device {device.type}",
            expected="cuda",
            hint="remove model.lora.quantize: adapters train on the CPU without it",
        )
    BITSANDBYTES.load()
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=quantize, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def load_model(
    path: str | Path,
    *,
    dtype: Literal["float32", "bfloat16"],
    device: str = "auto",
    quantize: Literal["nf4"] | None = None,
) -> PreTrainedModel:
    """Load a Hugging Face causal language model, with dropout disabled so that two forward passes agree.

    Args:
        path: Folder, or name on the Hugging Face hub. For an adapter's folder, its base is loaded and the adapter
            merged.
        dtype: Data type of the weights.
        device: ``cpu``, ``cuda``, ``cuda:1``; ``auto`` uses a GPU if one is available.
        quantize: Format of 4-bit weights, for adapters; ``None`` keeps the weights in `dtype`.

    Raises:
        ConfigError: 4-bit weights are requested on a device other than a GPU.
        UsageError: the folder, name or device does not exist, or the model is not a causal language model.
    """
    if is_adapter_folder(path):
        return merge_adapter(load_model(find_base(path), dtype=dtype, device=device), path)
    check_one_model(path)
    target = _device(device)
    if dtype == "bfloat16" and target.type == "cpu" and not cpu_has_bfloat16():
        _warn_of_slow_products()
    format_ = getattr(torch, dtype)
    options = {} if quantize is None else _quantization_options(quantize, dtype=format_, device=target)
    with _loading(path):
        config = _config(path)
        with silence_load_reports():
            loaded, report = model_class(config).from_pretrained(
                path,
                config=config,
                dtype=format_,
                attn_implementation=_attention(config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # check_complete rejects such models and names the tensors
                **options,
            )
    check_complete(path, report)
    _check_tied_head(path, loaded)
    model = _prepare(path, loaded)
    return model if options else model.to(target)


@functools.cache
def _warn_of_slow_products() -> None:
    _log.warning(
        "this processor has no bfloat16 instructions: matrix products may take fifty times as long as in float32; "
        "model.dtype=auto chooses the faster format"
    )


def make_model(path: str | Path) -> PreTrainedModel:
    """Create the model that `load_model` loads, in float32 and with newly initialized parameters."""
    with _loading(path):
        config = _config(path)
        model: PreTrainedModel = model_class(config).from_config(
            config, dtype=torch.float32, attn_implementation=_attention(config)
        )
    return _prepare(path, model)


@contextmanager
def silence_load_reports() -> Iterator[None]:
    """Suppress transformers' table of missing tensors in this block; `check_complete` reports them."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def check_complete(path: str | Path, report: Mapping[str, Any], *, new: tuple[str, ...] = ()) -> None:
    """Check that all tensors of a model came from its files, except those with a name that starts with one of `new`.

    `report` is transformers' loading info. Missing tensors have random values.

    Raises:
        UsageError: a tensor is missing or has another shape.
    """
    resized = {
        name: f"{name} of shape {list(found)}, not {list(own)}" for name, found, own in report["mismatched_keys"]
    }
    missing = sorted({*report["missing_keys"], *resized})
    wrong = [resized.get(name, f"no {name}") for name in missing if not name.startswith(new)]
    if wrong:
        more = f" and {len(wrong) - LISTED_TENSORS} more" if len(wrong) > LISTED_TENSORS else ""
        raise UsageError(
            f"the files of the model {path} do not contain all of its weights",
            got=f"{', '.join(wrong[:LISTED_TENSORS])}{more}",
            expected="all weights of the architecture in its config.json",
            hint="copy or download the model again; missing weights would be random",
        )


def _check_tied_head(path: str | Path, model: PreTrainedModel) -> None:
    """Check that the output head is the embedding if the config says so, because servers and exports trust the config.

    Newer versions of transformers load a different head from the files nevertheless.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not (type(model)._tied_weights_keys and getattr(model.config, "tie_word_embeddings", False)):
        return
    if head.weight is not embedding.weight:
        raise UsageError(
            f"the config of the model {path} ties the output head to the embedding",
            got="files with two different matrices",
            expected="one matrix, or tie_word_embeddings: false in its config.json",
            hint="if the head was trained separately, as by some merges of adapters, set the key to false; "
            "otherwise remove the head from the files",
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
            expected="a Hugging Face causal language model: a folder, or a name on the hub, which must be reachable",
        ) from error


def _config(path: str | Path) -> Any:
    return AutoConfig.from_pretrained(path, attention_dropout=0.0)


def model_class(config: Any) -> Any:
    """Choose the class of transformers for a config."""
    return AutoModelForImageTextToText if config.model_type in MODEL_TYPES else AutoModelForCausalLM


def _attention(config: Any) -> str:
    """Choose the attention implementation: SDPA, or eager attention for models that cap scores."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else "sdpa"


def _prepare(path: str | Path, model: PreTrainedModel) -> PreTrainedModel:
    check_logits(path, model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "jitter_noise"):  # routers add noise in training mode
            module.jitter_noise = 0.0
    use_fast_products(model)
    if model.device.type == "cpu":
        keep_freed_memory()
    return model.eval()


def check_logits(path: str | Path, model: PreTrainedModel) -> None:
    """Check that a model's logits are the product of its output head and last hidden states, with at most a soft cap.

    The trainer and the local engine compute log-probabilities from hidden states and head, and skip the model's own
    code between and after them. Some models scale hidden states or logits there, cap logits under another name, or drop
    a part of the vocabulary. There is no common config key for this, so the check runs the model's code with mocked
    decoder and head; it needs no weights. A model that does not call its `base_model` as a whole, such as OPT, is
    not checked.

    Raises:
        UsageError: the model changes hidden states before its head, or logits after it.
    """
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return
    (vocabulary, width), calls = head.weight.shape, list[Tensor]()
    hidden, made = _pattern(width, period=7) / 4, _pattern(vocabulary, period=11)
    if model.device.type != "meta":
        hidden, made = hidden.to(model.device), made.to(model.device)

    def decode(*_: Any, **__: Any) -> _Hidden:
        calls.append(hidden)
        return _Hidden((hidden,))

    def multiply(inputs: Tensor, *_: Any, **__: Any) -> Tensor:
        calls.append(inputs)
        return made.clone()

    logits, problem = made.new_zeros(0), ""
    with _replace_forward(model.base_model, decode), _replace_forward(head, multiply), torch.no_grad():
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=model.device)
        try:
            logits = model(input_ids=ids, use_cache=False).logits
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:  # from the model's code
            problem = f" ({error})"
    if not calls or calls[0] is not hidden:
        return
    if len(calls) != 2 or _differ(calls[1], hidden):
        raise _refusal(path, "its hidden states before the head" + problem)
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if _differ(logits, made if cap is None else (made / cap).tanh() * cap):
        raise _refusal(path, "its logits after the head" + problem)


def _refusal(path: str | Path, what: str) -> UsageError:
    return UsageError(
        f"this model changes {what}, so its log-probabilities would be computed wrongly",
        got=path,
        expected="logits that are the product of hidden states and head, without scaling or truncation",
        hint="choose a model of another family",
    )


def _pattern(columns: int, *, period: int) -> Tensor:
    """Return numbers around 0 that bfloat16 represents exactly: float32 [1, _TOKENS, columns]."""
    return (torch.arange(_TOKENS * columns) % period - period // 2).float().view(1, _TOKENS, columns)


def _differ(found: Tensor, expected: Tensor) -> bool:
    return found.shape != expected.shape or not torch.allclose(found.float(), expected, rtol=0, atol=_TOLERANCE)


class _Hidden(tuple[Tensor]):
    """Decoder output with hidden states only; all other fields are ``None``."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None


@contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward pass in this block."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def _check_folder(path: str | Path) -> None:
    folder = Path(path)
    looks_local = isinstance(path, Path) or folder.is_absolute() or str(path).startswith(".") or folder.exists()
    if not looks_local:
        return
    if not folder.is_dir():
        raise UsageError("model folder not found", got=folder, hint="check model.path")
    if not (folder / "config.json").is_file():
        raise UsageError("no model found in the folder", got=folder, expected="a folder with a config.json and weights")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError("unknown device", got=repr(name), expected="auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError("device not found", got=name, expected=f"one of {torch.cuda.device_count()} GPUs, or cpu")
    return device


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A GPU that torch can use."""

    device: str
    name: str
    memory_bytes: int


def accelerators() -> list[Accelerator]:
    """List the GPUs that torch can use; none if the machine has none or torch was built for the CPU."""
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        Accelerator(device=f"cuda:{index}", name=found.name, memory_bytes=found.total_memory)
        for index, found in enumerate(properties)
    ]


def torch_build() -> str:
    """Return torch's version and build target, for example ``2.9.1 for CUDA 12.8``."""
    cuda = torch.version.cuda
    return f"{torch.__version__} for {f'CUDA {cuda}' if cuda else 'the CPU'}"


def use_gpu(position: int) -> None:
    """Select the GPU at this position among those visible to the process as ``cuda``, if there are any."""
    if torch.cuda.is_available():
        torch.cuda.set_device(position)


def embedding_rows(path: str) -> int:
    """Return the number of rows of a model's embedding, which is its number of token ids.

    Raises:
        UsageError: the model does not exist.
    """
    try:
        return int(AutoConfig.from_pretrained(path).get_text_config().vocab_size)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"cannot read the config of {path}",
            got=str(error).strip().splitlines()[0],
            expected="a Hugging Face model folder, or a model on the hub and a connection to it",
        ) from error
