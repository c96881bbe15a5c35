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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from agentrl.errors import TrainingError
from agentrl.weights.owned_folder import OwnedFolder
from agentrl.weights.safetensors_folder import SHARD_BYTES, write_tensors

MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenWeights:
    """Weights that servers can read."""

    folder: Path
    """Absolute."""
    version: int
    bytes: int
    write_s: float


class FolderTransport:
    """Writes weights; the newest ones are kept, and everything is removed in the end.

    Args:
        root: Where the transport makes a folder of its own.
        shard_bytes: Most bytes of a file.

    Attributes:
        current: The weights that servers should have; ``None`` before the first `adopt`.
    """

    def __init__(self, root: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._own = OwnedFolder(root.absolute())
        self._shard_bytes = shard_bytes
        self._writes = 0
        self.current: WrittenWeights | None = None

    @classmethod
    def shared_memory(cls) -> FolderTransport:
        """In the memory file system of this machine, or its temporary folder where there is none."""
        return cls(MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir()))

    @property
    def path(self) -> Path:
        """The transport's own folder."""
        return self._own.path

    async def write(self, weights: Mapping[str, Any], version: int) -> WrittenWeights:
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
        return WrittenWeights(folder=folder, version=version, bytes=size, write_s=time.perf_counter() - began)

    def _write(self, weights: Mapping[str, Any], folder: Path) -> int:
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir()
        try:
            size = write_tensors(weights, partial, shard_bytes=self._shard_bytes)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return size

    async def adopt(self, written: WrittenWeights) -> None:
        """These are the weights that servers should have from now on; all others are removed."""
        self.current = written
        await asyncio.to_thread(self._clear, written.folder)

    def _clear(self, keep: Path) -> None:
        for other in self.path.iterdir():
            if other != keep:
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Remove everything. Idempotent."""
        self._own.close()
