"""Models and training states as files."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.render.images import ImageProcessor
from agentrl.training.critic.state import TrainedState
from agentrl.training.models.lora import save_adapter
from agentrl.training.ranks import Ranks

ALONE = "trainer.pt"
"""The state of a trainer without other ranks, in a checkpoint."""
SHARED = "trainer"
"""The folder of one that several ranks have written."""
_PROGRESS = "progress"
"""Stands before the names of what is no part of the optimizer."""

_SYSTEM_ERROR = re.compile(r"os error (\d+)")


def save_model_folder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    images: ImageProcessor | None = None,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    shard_size: str = "50GB",
) -> None:
    """Write a Hugging Face folder: config, safetensors, tokenizer with its chat template, image processor.

    Args:
        model: What is written.
        tokenizer: Its own.
        folder: Made if needed.
        images: The image processor of a model that sees.
        weights: Its tensors, where the model itself holds a part of them only.
        shard_size: Of the largest file, as transformers writes it.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with system_errors():
        state = None if weights is None else whole_on_cpu(model, weights)
        model.save_pretrained(folder, state_dict=state, max_shard_size=shard_size)
        _save_processors(tokenizer, folder, images)


def save_adapter_folder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    images: ImageProcessor | None = None,
    *,
    trained: Mapping[str, torch.Tensor],
) -> None:
    """Write an adapter as peft does, with the config of its base, tokenizer and image processor beside it.

    Args:
        model: With adapters.
        tokenizer: Its own.
        folder: Made if needed.
        images: The image processor of a model that sees.
        trained: The model's tensors that are trained, whole.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with system_errors():
        save_adapter(model, trained, folder)
        model.config.save_pretrained(folder)
        _save_processors(tokenizer, folder, images)


def _save_processors(tokenizer: PreTrainedTokenizerBase, folder: Path, images: ImageProcessor | None) -> None:
    tokenizer.save_pretrained(folder)
    if images is not None:
        images.processor.save_pretrained(folder)


def whole_on_cpu(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of whole tensors; an embedding that is the head under one name only, as loaders expect."""
    first, every = dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))
    return {name: weights[name].to("cpu", copy=True) for name in weights if name in first or name not in every}


def save_trainer(optimizer: TrainedState, progress: Mapping[str, Any], folder: Path, ranks: Ranks) -> None:
    """Write the state of a trainer; every rank writes its own part.

    Raises:
        OSError: it cannot be written.
    """
    if not ranks.are_many:
        save_state({"optimizer": optimizer.state_dict(), **progress}, folder / ALONE)
        return
    save_shared(shared_state(optimizer, progress), folder, ranks.control)


def shared_state(optimizer: TrainedState, progress: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The state of a trainer that is one of several, as tensors by name."""
    values = {f"{_PROGRESS}/{name}": torch.as_tensor(value) for name, value in progress.items()}
    return {**optimizer.named_state(), **values}


def save_shared(state: Mapping[str, Any], folder: Path, group: ProcessGroup | None) -> None:
    """Write this rank's part of a state; all ranks of a group must.

    Raises:
        OSError: it cannot be written, by this rank or another one.
    """
    try:
        save(dict(state), storage_writer=FileSystemWriter(folder / SHARED), process_group=group)
    except CheckpointException as error:  # on all ranks, with what each of them met
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                raise failure from error
        raise


def load_trainer(optimizer: TrainedState, progress: Mapping[str, Any], folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Read what `save_trainer` wrote with any number of ranks into the optimizer.

    Args:
        optimizer: Restored in place.
        progress: As it was given to `save_trainer`, with any values.
        folder: Of the checkpoint.
        ranks: Read together.

    Returns:
        The progress, as far as it was saved.

    Raises:
        UsageError: the state is of another optimizer.
    """
    if (folder / ALONE).is_file():
        state = load_state(folder / ALONE)
        optimizer.load_state_dict(state["optimizer"])
        return {name: state[name] for name in progress if name in state}
    reader = FileSystemReader(folder / SHARED)
    saved = reader.read_metadata().state_dict_metadata
    state = optimizer.room_for(name for name in saved if not name.startswith(f"{_PROGRESS}/"))
    room = {f"{_PROGRESS}/{name}": torch.as_tensor(value).clone() for name, value in progress.items()}
    values = {name: value for name, value in room.items() if name in saved}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is meant, in one process
        load({**state, **values}, storage_reader=reader, process_group=ranks.control, no_dist=not ranks.are_many)
    optimizer.load_named_state(state)
    return {name.removeprefix(f"{_PROGRESS}/"): value for name, value in values.items()}


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
