"""Weight transfer through a folder that servers can read, in a memory file system or on a disk.

write (a thread; episodes continue) ──► version-7.1.partial ── renamed when complete ──► version-7.1 ──► servers read it
                                                                                         │
                                            kept until the next version is in use, for returning servers

Folders of dead processes are removed by later ones. This module also writes the model folder from which launched
servers start.
"""

from __future__ import annotations

import copy
import fcntl
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.engine import InferenceServer
from agentrl.errors import TrainingError, UsageError
from agentrl.errors.foreign import run_in_own_thread
from agentrl.models.model_files import save_config, save_tokenizer
from agentrl.weights.contract import PreparedWeights, Transport
from agentrl.weights.tensors import CheckpointNames, split_by_bytes

PREFIX = "agentrl-weights-"
LOCK = ".lock"
SHARD_BYTES = 2 << 30
"""Maximum number of bytes of a file, unless a single tensor is larger."""
INDEX = "model.safetensors.index.json"
MEMORY = Path("/dev/shm")
HEAD = "lm_head.weight"


class OwnedFolder:
    """New folder of this process under `root`; folders of dead processes there are removed first."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        clear_abandoned(root)
        self.path = root / f"{PREFIX}{os.getpid()}-{uuid4().hex[:8]}"
        self._lock = _open_locked(lock_file(self.path))
        self.path.mkdir()
        self._remove = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def close(self) -> None:
        """Remove the folder now instead of at the end of the process. Idempotent."""
        self._remove()


def lock_file(folder: Path) -> Path:
    """Return the lock file of a folder, which its owner holds while it is alive."""
    return folder.with_name(folder.name + LOCK)


def clear_abandoned(root: Path) -> list[Path]:
    """Remove this user's folders whose owner has ended; return them."""
    removed = []
    for folder in {Path(str(path).removesuffix(LOCK)) for path in root.glob(f"{PREFIX}*")}:
        with suppress(OSError):  # locked by its owner or by another process that removes it, or owned by another user
            lock = _open_locked(lock_file(folder))
            _remove(folder, lock, os.getpid())
            removed.append(folder)
    return sorted(removed)


def _open_locked(path: Path) -> int:
    """Create or open a file and lock it; raises `BlockingIOError` if another process has locked it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another process removed the file between opening and locking it


def _remove(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child must not remove it at its end
        return
    shutil.rmtree(folder, ignore_errors=True)
    lock_file(folder).unlink(missing_ok=True)
    os.close(lock)


def write_tensors(weights: Mapping[str, Tensor], folder: Path, *, shard_bytes: int = SHARD_BYTES) -> int:
    """Write tensors to an existing folder; return their number of bytes.

    Tensors that share memory (embedding and output head of a tied model) are written under each name, for servers that
    keep two copies.
    """
    total = 0
    written: list[list[str]] = []
    unnumbered = "shard-{:05d}.partial".format  # the number of files is not known yet
    for shard in split_by_bytes(weights, shard_bytes):  # one at a time: tensors may be gathered as they are read
        save_file(_separate(shard), folder / unnumbered(len(written)), metadata={"format": "pt"})
        written.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    names = [f"model-{number:05d}-of-{len(written):05d}.safetensors" for number in range(1, len(written) + 1)]
    if len(written) == 1:
        names = ["model.safetensors"]
    for number, name in enumerate(names):
        (folder / unnumbered(number)).rename(folder / name)
    if len(written) > 1:
        files = {tensor: name for name, tensors in zip(names, written, strict=True) for tensor in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}))
    return total


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors without shared memory, as safetensors requires; copy only those that share memory."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage().data_ptr()
        owns_all = plain.untyped_storage().nbytes() == plain.nbytes
        separate[name] = plain if owns_all and storage not in seen else plain.clone()
        seen.add(storage)
    return separate


def memory_folder() -> Path:
    """Return this machine's memory file system, or its temporary folder if it has none."""
    return MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())


class WrittenWeights(PreparedWeights):
    """Weights in a folder."""

    def __init__(self, folder: Path, *, version: int, size: int, seconds: float) -> None:
        super().__init__(version=version, size=size, seconds=seconds)
        self.folder = folder

    async def give_to(self, server: InferenceServer) -> None:
        """Let the server load the folder."""
        await server.load_weights(self.folder, self.version)

    def tensors(self) -> Mapping[str, Tensor]:
        """Read the tensors from the folder."""
        return {name: tensor for path in self.folder.glob("*.safetensors") for name, tensor in load_file(path).items()}

    async def discard(self) -> None:
        """Remove the folder."""
        await run_in_own_thread(shutil.rmtree, self.folder, ignore_errors=True)


class FolderTransport(Transport):
    """Transport through its own folder under `root`, in files of at most `shard_bytes`."""

    _prepared_class: type[WrittenWeights] = WrittenWeights

    def __init__(self, root: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._own = OwnedFolder(root.absolute())
        self._shard_bytes = shard_bytes
        self._writes = 0

    @classmethod
    def shared_memory(cls) -> FolderTransport:
        """Make a transport in `memory_folder`."""
        return cls(memory_folder())

    @property
    def path(self) -> Path:
        """Folder of this transport."""
        return self._own.path

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> WrittenWeights:
        """Write a version in a thread; its folder exists only when it is complete.

        Raises:
            TrainingError: the disk or memory is full, or writing is not permitted.
        """
        began = time.perf_counter()
        self._writes += 1
        folder = self.path / f"version-{version}.{self._writes}"
        try:
            size = await run_in_own_thread(self._write, weights, folder)
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"cannot write the weights of version {version}",
                got=f"{type(error).__name__}: {error}",
                expected=f"space for two versions of the model in {self.path.parent}",
                hint="free space there, or set engine.transport=disk",
            ) from error
        return self._prepared_class(folder, version=version, size=size, seconds=time.perf_counter() - began)

    def _write(self, weights: Mapping[str, Tensor], folder: Path) -> int:
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir()
        try:
            size = self._fill(weights, partial)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return size

    def _fill(self, weights: Mapping[str, Tensor], folder: Path) -> int:
        return write_tensors(weights, folder, shard_bytes=self._shard_bytes)

    async def close(self) -> None:
        """Remove the transport's folder. Idempotent."""
        await run_in_own_thread(self._own.close)


def write_served_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> int:
    """Write config, tokenizer and weights to a folder; return the number of bytes of the weights.

    The copy is never tied, and every update contains the output head: a server may keep a packed copy of it, which an
    update of only the embedding would not reach. No generation config is written, because each request contains
    its sampling parameters. Fused experts are split as in checkpoints.

    Raises:
        UsageError: the model has no tensor for its output head.
    """
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if HEAD not in weights:
        raise UsageError("the model cannot be served", got=type(model).__name__, expected=f"a tensor {HEAD}")
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    config.get_text_config().tie_word_embeddings = False
    config.architectures = [type(model).__name__]
    config.dtype = next(iter(weights.values())).dtype
    save_config(config, folder)
    save_tokenizer(tokenizer, folder)
    return write_tensors(CheckpointNames(model).apply(weights), folder)
