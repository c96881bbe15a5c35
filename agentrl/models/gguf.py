"""Conversion of GGUF files (llama.cpp, Ollama) to Hugging Face models, which can be trained and served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights

from agentrl.errors import UsageError
from agentrl.models.load import model_class, silence_load_reports
from agentrl.registry import Extra

GGUF = Extra(name="gguf", module="gguf")
MAGIC = b"GGUF"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
"""Names of the embedding and the output head in a GGUF file."""
COPY_TOLERANCE = 0.1
"""Maximum relative difference (Frobenius norm) of quantized copies of one matrix. Copies in 5 and 8 bits differ by
0.04; separately trained matrices differ by about 1."""
HALF_PRECISION_BITS = 8.0
"""Bits per weight below which storing the weights in bfloat16 loses no relevant precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedGguf:
    """Contents of a GGUF file."""

    model: PreTrainedModel
    """Model on the CPU, with dequantized weights in the requested format."""
    tokenizer: PreTrainedTokenizerFast
    """Tokenizer with the file's chat template."""
    bits_per_weight: float
    """Mean number of bits per weight over all tensors of the file."""
    retied: float | None
    """Relative difference of the file's embedding and output head, if they were copies and are tied again."""


def load_gguf(file: Path, *, dtype: Literal["auto", "float32", "bfloat16"] = "auto") -> LoadedGguf:
    """Load the model and the tokenizer of a GGUF file.

    Quantization tools may store tied weights twice, as embedding and output head, in different formats. Such copies are
    tied again; the copy with more bits is kept.

    Args:
        file: Path of the file.
        dtype: Data type of the model; ``auto`` is bfloat16 for files with fewer than 8 bits per weight.

    Raises:
        UsageError: the file does not exist, is not a GGUF file, or has an architecture that transformers does not
            support, or the extra is not installed.
    """
    _check_magic(file)
    GGUF.load()
    GGUF.load("accelerate")  # required by transformers to load GGUF files
    try:
        bits = _bits_by_tensor(file)
        with silence_load_reports():
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            kind = model_class(config)
            found = kind.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        retied = _tie_copies(found, bits.sizes)
        number_format = dtype if dtype != "auto" else "bfloat16" if bits.mean < HALF_PRECISION_BITS else "float32"
        model = _without_source(kind, found, getattr(torch, number_format))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UsageError(
            f"cannot read {file}",
            got=str(error).strip().splitlines()[0],
            expected="a language model of an architecture whose GGUF files transformers can read",
        ) from error
    return LoadedGguf(
        model=model.eval(),
        tokenizer=cast("PreTrainedTokenizerFast", tokenizer),
        bits_per_weight=bits.mean,
        retied=retied,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bits:
    mean: float
    sizes: dict[str, float]
    """Bits per weight of each tensor, by its name in the file."""


def _bits_by_tensor(file: Path) -> _Bits:
    tensors = GGUF.load().GGUFReader(file).tensors
    sizes = {tensor.name: 8.0 * int(tensor.n_bytes) / int(tensor.n_elements) for tensor in tensors}
    total = sum(int(tensor.n_elements) for tensor in tensors)
    return _Bits(mean=8.0 * sum(int(tensor.n_bytes) for tensor in tensors) / total, sizes=sizes)


def _tie_copies(model: PreTrainedModel, bits: dict[str, float]) -> float | None:
    """Tie embedding and output head if the file has both and they are quantized copies; return their difference."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or not {EMBEDDING, HEAD} <= bits.keys() or embedding.weight.shape != head.weight.shape:
        return None
    with torch.no_grad():
        difference = float((embedding.weight - head.weight).norm() / head.weight.norm())
        if difference > COPY_TOLERANCE:
            return None
        if bits[HEAD] > bits[EMBEDDING]:
            embedding.weight.copy_(head.weight)
    model.config.get_text_config().tie_word_embeddings = True
    model.config.tie_word_embeddings = True
    return difference


def _without_source(kind: Any, found: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Copy a model without its reference to the GGUF file, with which transformers would refuse to save it."""
    settings = {key: value for key, value in found.config.to_dict().items() if key != "quantization_config"}
    config = found.config.__class__.from_dict(settings)
    with no_init_weights():
        model: PreTrainedModel = kind.from_config(config, dtype=dtype)
    model.load_state_dict(found.state_dict())
    model.tie_weights()
    return model


def _check_magic(file: Path) -> None:
    if not file.is_file():
        raise UsageError("file not found", got=file, expected="a GGUF file")
    with file.open("rb") as opened:
        start = opened.read(len(MAGIC))
    if start != MAGIC:
        raise UsageError(f"{file} is not a GGUF file", got=f"a file that starts with {start!r}", expected=f"{MAGIC!r}")
