"""Models and training states as files.

A checkpoint holds the state of the optimizer and of all signals, or nothing; a copy of it may be written while
training goes on.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.errors import UsageError
from agentrl.models.lora import save_adapter
from agentrl.render.images import ImageProcessor
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.fsdp import sharded_like
from agentrl.training.optimizer import PolicyOptimizer

T = TypeVar("T")

CRITIC, PROCESS_REWARD, REFERENCE = "critic", "process_reward", "reference"
"""Name parts of a state."""
PARTS = {
    CRITIC: "trainer.critic",
    PROCESS_REWARD: "trainer.process_reward",
    REFERENCE: "algorithm.reference.refresh_every",
}
"""The settings that ask for them."""


class SignalState(Protocol):
    """State of a signal's model, with its weights, because no model folder holds them."""

    def named_state(self) -> dict[str, torch.Tensor]:
        """Give everything as tensors by name."""

    def room_for(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors into which a state of these names can be read."""

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `room_for` made, filled."""


class TrainerState:
    """State of the policy's optimizer and of the signals that have any, by name."""

    def __init__(self, policy: PolicyOptimizer, signals: Mapping[str, SignalState | None]) -> None:
        self._policy = policy
        self._signals = {name: part for name, part in signals.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Give the policy's state with the signals' tensors by name."""
        return {**self._policy.state_dict(), **{name: part.named_state() for name, part in self._signals.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the tensors are copied, and sharded as the models are.

        Raises:
            UsageError: the state is of another optimizer or signal, or there is one on one side only.
        """
        saved: dict[str, dict[str, torch.Tensor]] = {name: state.get(name, {}) for name in PARTS}
        rooms = {name: self._room(name, list(own)) for name, own in saved.items()}
        self._policy.load_state_dict({name: part for name, part in state.items() if name not in PARTS})
        with torch.no_grad():
            for name, room in rooms.items():
                for key, tensor in room.items():
                    tensor.copy_(sharded_like(saved[name][key], tensor))
        self._load(rooms)

    def named_state(self) -> dict[str, torch.Tensor]:
        """All tensors by name; a signal's behind its own, as in ``critic/``."""
        return {
            **self._policy.named_state(),
            **{
                f"{name}/{key}": tensor
                for name, part in self._signals.items()
                for key, tensor in part.named_state().items()
            },
        }

    def room_for(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors into which a state of these names can be read.

        Raises:
            UsageError: as `load_state_dict`.
        """
        policy, parts = _divided(dict.fromkeys(names))
        rooms = {name: self._room(name, list(own)) for name, own in parts.items()}
        return {
            **self._policy.room_for(policy),
            **{f"{name}/{key}": tensor for name, room in rooms.items() for key, tensor in room.items()},
        }

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what `room_for` made, filled."""
        policy, parts = _divided(state)
        self._policy.load_named_state(policy)
        self._load(parts)

    def _room(self, name: str, keys: list[str]) -> dict[str, torch.Tensor]:
        if name in self._signals:
            return self._signals[name].room_for(keys)
        if keys:
            raise UsageError(
                f"the checkpoint holds a {name.replace('_', ' ')}",
                got=f"no {PARTS[name]}",
                hint=f"set {PARTS[name]} as the run had it",
            )
        return {}

    def _load(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, part in self._signals.items():
            part.load_named_state(states[name])


def _divided(named: Mapping[str, T]) -> tuple[dict[str, T], dict[str, dict[str, T]]]:
    """Divide a state into the policy's and each signal's, whose names then have no prefix."""
    parts: dict[str, dict[str, T]] = {name: {} for name in PARTS}
    policy: dict[str, T] = {}
    for name, value in named.items():
        part, _, rest = name.partition("/")
        if part in parts:
            parts[part][rest] = value
        else:
            policy[name] = value
    return policy, parts


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

    `weights` are the model's tensors in one piece, where the model itself holds a part of them only.

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
    """Write an adapter's trained tensors as peft does, with the config of its base, tokenizer and image processor.

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


def save_trainer(optimizer: TrainerState, progress: Mapping[str, Any], folder: Path, ranks: Ranks) -> None:
    """Write the state of a trainer; every rank writes its own part.

    Raises:
        OSError: it cannot be written.
    """
    if not ranks.are_many:
        save_state({"optimizer": optimizer.state_dict(), **progress}, folder / ALONE)
        return
    _save_shared(_shared_state(optimizer, progress), folder, ranks.control)


def _shared_state(optimizer: TrainerState, progress: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    values = {f"{_PROGRESS}/{name}": torch.as_tensor(value) for name, value in progress.items()}
    return {**optimizer.named_state(), **values}


def _save_shared(state: Mapping[str, Any], folder: Path, group: ProcessGroup | None) -> None:
    try:
        save(dict(state), storage_writer=FileSystemWriter(folder / SHARED), process_group=group)
    except CheckpointException as error:  # on all ranks, with what each of them met
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                raise failure from error
        raise


def load_trainer(optimizer: TrainerState, progress: Mapping[str, Any], folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Read what `save_trainer` wrote with any number of ranks into the optimizer; `progress` names what else is read.

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


COPY, WRITE, FINISH = "copy", "write copy", "finish copy"
"""What rank 0 asks of the others."""


class StateCopies:
    """Copies the state of a trainer, one at a time, and writes the copy from a thread."""

    def __init__(self, trained: TrainerState, progress: Callable[[], Mapping[str, Any]], ranks: Ranks) -> None:
        self._trained, self._progress, self._ranks = trained, progress, ranks
        self._state: Mapping[str, Any] = {}
        self._thread: threading.Thread | None = None

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """Give the calls that rank 0 makes on the other ranks, by name."""
        return {COPY: self._copy, WRITE: self._write_beside, FINISH: self._finish}

    def take(self) -> Callable[[Path], None]:
        """Copy the state into the CPU's memory; gives what writes it, from any thread, and raises OSError."""
        with self._ranks.broadcast_call(COPY):
            self._copy()
        return self._write

    def _copy(self) -> None:
        own = self._trained.state_dict() if not self._ranks.are_many else None
        state = (
            _shared_state(self._trained, self._progress()) if own is None else {"optimizer": own, **self._progress()}
        )
        self._state = _copied(state)

    def _write(self, folder: Path) -> None:
        if not self._ranks.are_many:
            save_state(self._state, folder / ALONE)
            return
        with self._ranks.broadcast_call(WRITE, folder):  # waits for a step to end; the others write beside theirs, too
            pass
        try:
            _save_shared(self._state, folder, self._ranks.beside)
        finally:
            with self._ranks.broadcast_call(FINISH):
                self._state = {}

    def _write_beside(self, folder: Path) -> None:
        self._thread = threading.Thread(target=self._write_own, args=(folder,), name="checkpoint", daemon=True)
        self._thread.start()

    def _write_own(self, folder: Path) -> None:
        try:
            _save_shared(self._state, folder, self._ranks.beside)
        except OSError:
            return  # rank 0 gets it as well, and says so

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread, self._state = None, {}


def _copied(value: Any) -> Any:
    """Nested data with copies of its tensors, in the CPU's memory; a tensor in shards stays in shards."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value
