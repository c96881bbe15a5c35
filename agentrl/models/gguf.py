"""A GGUF file, as llama.cpp and Ollama use them, turned into a Hugging Face model that can be trained and served."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from agentrl.errors import UsageError
from agentrl.models.load import model_class, reports_left_out
from agentrl.registry import Extra

GGUF = Extra(name="gguf", module="gguf")
MAGIC = b"GGUF"


class LoadedGguf(NamedTuple):
    """Contents of a GGUF file."""

    model: PreTrainedModel
    """In float32 on the CPU, its quantized weights as numbers."""
    tokenizer: PreTrainedTokenizerFast
    """With the file's chat template."""


def load_gguf(file: Path) -> LoadedGguf:
    """Load the model and the tokenizer of a GGUF file.

    Raises:
        UsageError: there is no such file, it is no GGUF file, its architecture is unknown to transformers, or the extra
            is not installed.
    """
    _check_magic(file)
    GGUF.load()
    GGUF.load("accelerate")  # transformers loads GGUF files with it
    try:
        with reports_left_out():
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            kind = model_class(config)
            found = kind.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            # a model that knows where its weights come from refuses to be saved
            plain = found.config.__class__.from_dict(
                {key: value for key, value in found.config.to_dict().items() if key != "quantization_config"}
            )
            model = kind.from_config(plain, dtype=torch.float32)
            model.load_state_dict(found.state_dict())
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UsageError(
            f"cannot read {file}",
            got=str(error).strip().splitlines()[0],
            expected="a language model of an architecture whose GGUF files transformers can read",
        ) from error
    return LoadedGguf(model.eval(), cast("PreTrainedTokenizerFast", tokenizer))


def _check_magic(file: Path) -> None:
    if not file.is_file():
        raise UsageError("there is no such file", got=file, expected="a GGUF file")
    with file.open("rb") as opened:
        begins = opened.read(len(MAGIC))
    if begins != MAGIC:
        raise UsageError(f"{file} is no GGUF file", got=f"a file that begins with {begins!r}", expected=f"{MAGIC!r}")
