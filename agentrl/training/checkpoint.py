"""Models and training states as files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.render.images import ImageProcessor

_SYSTEM_ERROR = re.compile(r"os error (\d+)")


def save_model_folder(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, images: ImageProcessor | None = None
) -> None:
    """Write a Hugging Face folder: config, safetensors, tokenizer with its chat template, image processor.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with system_errors():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if images is not None:
            images.processor.save_pretrained(folder)


def save_state(state: Mapping[str, Any], path: Path) -> None:
    """Write a state of tensors and plain data, bit for bit.

    Raises:
        OSError: it cannot be written.
    """
    with system_errors(), path.open("wb") as file:
        torch.save(dict(state), file)


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote, tensors on the CPU."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


@contextmanager
def system_errors() -> Iterator[None]:
    """Bring back the system's own error (a full disk) where a library hides it in its own.

    Raises:
        OSError: the system's.
    """
    try:
        yield
    except SafetensorError as error:
        found = _SYSTEM_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
