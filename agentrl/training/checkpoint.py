"""Storage of models and training states; a copy of a state can be written while training continues."""

from __future__ import annotations

import contextlib
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
from agentrl.models.model_files import complete_config, save_config, save_tokenizer
from agentrl.render.images import ImageProcessor
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.fsdp import sharded_like
from agentrl.training.optimizer import PolicyOptimizer

T = TypeVar("T")

CRITIC, PROCESS_REWARD, REFERENCE, BASELINE = "critic", "process_reward", "reference", "running_baseline"
PARTS = {
    CRITIC: "trainer.critic",
    PROCESS_REWARD: "trainer.process_reward",
    REFERENCE: "algorithm.reference.refresh_every",
    BASELINE: "algorithm.advantage rae or spo",
}
"""Config keys that create the signals whose state is saved, by signal."""
STATE_FILE = "trainer.pt"
STATE_FOLDER = "trainer"
_PROGRESS = "progress"
"""Prefix of the names of values that do not belong to an optimizer or signal."""
_SYSTEM_ERROR = re.compile(r"os error (\d+)")
COPY, WRITE, FINISH = "copy", "write copy", "finish copy"
"""Names of calls that rank 0 makes on the other ranks."""


class SignalState(Protocol):
    """State of a signal's model, including its weights, which are not in the checkpoint's model folder."""

    def named_state(self) -> dict[str, torch.Tensor]:
        """Return the whole state as tensors by name."""

    def allocate_state(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Allocate tensors for a saved state with these names."""

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of `allocate_state` after they have been filled."""


class TrainerState:
    """State of the policy's optimizer and of the signals with a trainable model."""

    def __init__(self, policy: PolicyOptimizer, signals: Mapping[str, SignalState | None]) -> None:
        self._policy = policy
        self._signals = {name: part for name, part in signals.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's state with the signals' tensors by name."""
        return {**self._policy.state_dict(), **{name: part.named_state() for name, part in self._signals.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`; tensors are copied, and sharded like the models.

        Raises:
            UsageError: the state is from another optimizer or signal, or only one side has a signal.
        """
        saved: dict[str, dict[str, torch.Tensor]] = {name: state.get(name, {}) for name in PARTS}
        rooms = {name: self._allocate(name, list(own)) for name, own in saved.items()}
        self._policy.load_state_dict({name: part for name, part in state.items() if name not in PARTS})
        with torch.no_grad():
            for name, room in rooms.items():
                for key, tensor in room.items():
                    tensor.copy_(sharded_like(saved[name][key], tensor))
        self._load(rooms)

    def named_state(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name; those of a signal have its name as prefix, such as ``critic/``."""
        return {
            **self._policy.named_state(),
            **{
                f"{name}/{key}": tensor
                for name, part in self._signals.items()
                for key, tensor in part.named_state().items()
            },
        }

    def allocate_state(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Allocate tensors for a saved state with these names."""
        policy, parts = _split_state(dict.fromkeys(names))
        rooms = {name: self._allocate(name, list(own)) for name, own in parts.items()}
        return {
            **self._policy.allocate_state(policy),
            **{f"{name}/{key}": tensor for name, room in rooms.items() for key, tensor in room.items()},
        }

    def load_named_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors of `allocate_state` after they have been filled."""
        policy, parts = _split_state(state)
        self._policy.load_named_state(policy)
        self._load(parts)

    def _allocate(self, name: str, keys: list[str]) -> dict[str, torch.Tensor]:
        if name in self._signals:
            return self._signals[name].allocate_state(keys)
        if keys:
            raise UsageError(
                f"the checkpoint contains a {name.replace('_', ' ')}",
                got=f"no {PARTS[name]}",
                hint=f"set {PARTS[name]} to the run's value",
            )
        return {}

    def _load(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, part in self._signals.items():
            part.load_named_state(states[name])


def _split_state(named: Mapping[str, T]) -> tuple[dict[str, T], dict[str, dict[str, T]]]:
    """Split a state into the policy's and each signal's; remove the signals' prefixes from names."""
    parts: dict[str, dict[str, T]] = {name: {} for name in PARTS}
    policy: dict[str, T] = {}
    for name, value in named.items():
        part, _, rest = name.partition("/")
        if part in parts:
            parts[part][rest] = value
        else:
            policy[name] = value
    return policy, parts


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

    `weights` are the whole tensors, if the model itself holds only shards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with system_errors():
        state = None if weights is None else whole_on_cpu(model, weights)
        model.save_pretrained(folder, state_dict=state, max_shard_size=shard_size)
        complete_config(folder)
        _save_processors(tokenizer, folder, images)


def save_adapter_folder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    images: ImageProcessor | None = None,
    *,
    trained: Mapping[str, torch.Tensor],
) -> None:
    """Write an adapter's trained tensors in peft's format, with the base's config, tokenizer and image processor."""
    folder.mkdir(parents=True, exist_ok=True)
    with system_errors():
        save_adapter(model, trained, folder)
        save_config(model.config, folder)
        _save_processors(tokenizer, folder, images)


def save_base_folder(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, images: ImageProcessor | None = None
) -> None:
    """Write the base's config, tokenizer and image processor to the folder that contains several adapters' folders."""
    folder.mkdir(parents=True, exist_ok=True)
    with system_errors():
        save_config(model.config, folder)
        _save_processors(tokenizer, folder, images)


def _save_processors(tokenizer: PreTrainedTokenizerBase, folder: Path, images: ImageProcessor | None) -> None:
    save_tokenizer(tokenizer, folder)
    if images is not None:
        images.processor.save_pretrained(folder)


def whole_on_cpu(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy whole tensors to the CPU; keep tied weights under one name only, as loaders expect."""
    first, every = dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))
    return {name: weights[name].to("cpu", copy=True) for name in weights if name in first or name not in every}


def _save_shared(state: Mapping[str, Any], folder: Path, group: ProcessGroup | None) -> None:
    try:
        save(dict(state), storage_writer=FileSystemWriter(folder / STATE_FOLDER), process_group=group)
    except CheckpointException as error:  # raised on all ranks, with the failures of each
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                raise failure from error
        raise


def save_state(state: Mapping[str, Any], path: Path) -> None:
    """Write a state of tensors and plain data, bit for bit."""
    with system_errors(), path.open("wb") as file:
        torch.save(dict(state), file)


def load_state(path: Path) -> dict[str, Any]:
    """Read a state that `save_state` wrote, with its tensors on the CPU."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


@contextmanager
def system_errors() -> Iterator[None]:
    """Raise the operating system's error (such as a full disk) where a library wraps it in its own."""
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


class TrainerCheckpoint:
    """Storage of the state that a run needs to resume bit for bit, except for the weights.

    `progress` returns the values that are saved with the models' state; `restore` loads them from a checkpoint.
    """

    def __init__(
        self,
        state: TrainerState,
        progress: Callable[[], dict[str, Any]],
        restore: Callable[[Mapping[str, Any]], None],
        ranks: Ranks,
    ) -> None:
        self.state, self._progress, self._restore, self._ranks = state, progress, restore, ranks
        self._copy_of_state: Mapping[str, Any] = {}
        self._thread: threading.Thread | None = None

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """Return the calls that rank 0 makes on the other ranks, by name."""
        calls = {"save": self._save, "load": self._load}
        return {**calls, COPY: self._copy, WRITE: self._write_in_thread, FINISH: self._finish}

    def save(self, folder: Path) -> None:
        """Write the state to an existing folder; every rank writes its own part.

        Raises:
            OSError: the state cannot be written.
            TrainingError: a rank was lost.
        """
        with self._ranks.broadcast_call("save", folder):
            self._save(folder)

    def _save(self, folder: Path) -> None:
        if self._ranks.is_distributed:
            _save_shared(self._everything(), folder, self._ranks.control)
        else:
            save_state(self._everything(), folder / STATE_FILE)

    def _everything(self) -> dict[str, Any]:
        progress = self._progress()
        if not self._ranks.is_distributed:
            return {"optimizer": self.state.state_dict(), **progress}
        values = {f"{_PROGRESS}/{name}": torch.as_tensor(value) for name, value in progress.items()}
        return {**self.state.named_state(), **values}

    def load(self, folder: Path) -> None:
        """Restore a state that any number of ranks saved; the weights must be loaded first.

        Raises:
            UsageError: the state is from another optimizer or signal.
            TrainingError: a rank was lost.
        """
        with self._ranks.broadcast_call("load", folder):
            self._load(folder)

    def _load(self, folder: Path) -> None:
        if (folder / STATE_FILE).is_file():
            saved_state = load_state(folder / STATE_FILE)
            self.state.load_state_dict(saved_state.pop("optimizer"))
            self._restore(saved_state)
            return
        reader = FileSystemReader(folder / STATE_FOLDER)
        saved = reader.read_metadata().state_dict_metadata
        state = self.state.allocate_state(name for name in saved if not name.startswith(f"{_PROGRESS}/"))
        room = {f"{_PROGRESS}/{name}": torch.as_tensor(value).clone() for name, value in self._progress().items()}
        values = {name: value for name, value in room.items() if name in saved}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected with a single process
            ranks = self._ranks
            load(
                {**state, **values},
                storage_reader=reader,
                process_group=ranks.control,
                no_dist=not ranks.is_distributed,
            )
        self.state.load_named_state(state)
        self._restore({name.removeprefix(f"{_PROGRESS}/"): value for name, value in values.items()})

    def copy(self) -> Callable[[Path], None]:
        """Copy the state; return a function that writes the copy to a folder, for a thread while training continues."""
        with self._ranks.broadcast_call(COPY):
            self._copy()
        return self._write

    def _copy(self) -> None:
        self._copy_of_state = _copy_to_cpu(self._everything())

    def _write(self, folder: Path) -> None:
        if not self._ranks.is_distributed:
            save_state(self._copy_of_state, folder / STATE_FILE)
            return
        with self._ranks.broadcast_call(
            WRITE, folder
        ):  # waits until a step has ended; the other ranks also write during the next steps
            pass
        try:
            _save_shared(self._copy_of_state, folder, self._ranks.background)
        finally:
            with self._ranks.broadcast_call(FINISH):
                self._copy_of_state = {}

    def _write_in_thread(self, folder: Path) -> None:
        def write() -> None:
            with contextlib.suppress(OSError):  # rank 0 gets the error as well, and reports it
                _save_shared(self._copy_of_state, folder, self._ranks.background)

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread, self._copy_of_state = None, {}


def _copy_to_cpu(value: Any) -> Any:
    """Copy nested data, with its tensors in the CPU's memory; sharded tensors remain sharded."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _copy_to_cpu(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy_to_cpu(item) for item in value)
    return value
