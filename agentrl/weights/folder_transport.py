"""Weights through a folder that the servers can see: of a memory file system, or of a disk.

write (a thread; episodes go on) ──► version-7.1.partial ── renamed when whole ──► version-7.1 ──► servers read it
                                                                                   │
                                        kept until the next one is in use: a server that comes back reads it
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from agentrl.errors import TrainingError
from agentrl.server import InferenceServer
from agentrl.weights.owned_folder import OwnedFolder
from agentrl.weights.safetensors_folder import SHARD_BYTES, write_tensors
from agentrl.weights.transport import PreparedWeights, Transport

MEMORY = Path("/dev/shm")
AdapterWriter: TypeAlias = Callable[[Mapping[str, Tensor], Path], None]
"""Writes the tensors of an adapter into a folder, as peft does."""


def memory_folder() -> Path:
    """The memory file system of this machine, or its temporary folder where there is none."""
    return MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())


class FolderTransport(Transport):
    """Writes weights into a folder of its own, and removes everything in the end.

    Args:
        root: Where the transport makes its folder.
        shard_bytes: Most bytes of a file.
    """

    def __init__(self, root: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._own = OwnedFolder(root.absolute())
        self._shard_bytes = shard_bytes
        self._writes = 0

    @classmethod
    def shared_memory(cls) -> FolderTransport:
        """In the memory file system of this machine, or its temporary folder where there is none."""
        return cls(memory_folder())

    @property
    def path(self) -> Path:
        """The transport's own folder."""
        return self._own.path

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> WrittenWeights:
        """Write a version, in a thread; it is there as a whole or not at all.

        Raises:
            TrainingError: no room, or no permission.
        """
        began = time.perf_counter()
        self._writes += 1
        folder = self.path / f"version-{version}.{self._writes}"
        try:
            size = await asyncio.to_thread(self._write, weights, folder)
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"cannot write the weights of version {version}",
                got=f"{type(error).__name__}: {error}",
                expected=f"room for two versions of the model in {self.path.parent}",
                hint="make room there, or set engine.transport=disk",
            ) from error
        return self._written(folder, version=version, size=size, seconds=time.perf_counter() - began)

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

    def _written(self, folder: Path, *, version: int, size: int, seconds: float) -> WrittenWeights:
        return WrittenWeights(folder, version=version, size=size, seconds=seconds)

    async def close(self) -> None:
        """Remove everything. Idempotent."""
        await asyncio.to_thread(self._own.close)


class AdapterTransport(FolderTransport):
    """Writes adapters alone, for servers that have what they belong to.

    Args:
        root: Where the transport makes its folder.
        write: Writes one.
    """

    def __init__(self, root: Path, write: AdapterWriter) -> None:
        super().__init__(root)
        self._write_adapter = write

    def _fill(self, weights: Mapping[str, Tensor], folder: Path) -> int:
        self._write_adapter(weights, folder)
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    def _written(self, folder: Path, *, version: int, size: int, seconds: float) -> WrittenWeights:
        return WrittenAdapter(folder, version=version, size=size, seconds=seconds)


class WrittenWeights(PreparedWeights):
    """Weights in a folder.

    Attributes:
        folder: Absolute.
    """

    def __init__(self, folder: Path, *, version: int, size: int, seconds: float) -> None:
        super().__init__(version=version, size=size, seconds=seconds)
        self.folder = folder

    async def give_to(self, server: InferenceServer) -> None:
        """Let it read the folder."""
        await server.load_weights(self.folder, self.version)

    def tensors(self) -> Mapping[str, Tensor]:
        """Read from the folder."""
        return {name: tensor for path in self.folder.glob("*.safetensors") for name, tensor in load_file(path).items()}

    async def discard(self) -> None:
        """Remove the folder."""
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)


class WrittenAdapter(WrittenWeights):
    """An adapter in a folder."""

    async def give_to(self, server: InferenceServer) -> None:
        """Let it read the folder."""
        await server.load_adapter(self.folder, self.version)
