"""Atomic checkpoints: a folder is either complete or absent.

A checkpoint is written into a hidden folder, synced to disk, and renamed: ``checkpoints/step-000010``. Its
``manifest.json`` holds the size and checksum of every file, and its own checksum. A folder that does not match its
manifest is skipped with a warning, and the previous one is used. Folders with other names (``step-000010-keep``) belong
to the user: they are neither read nor removed.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError
from agentrl.observe.files import (
    DamagedRecord,
    decode_record,
    encode_record,
    first_free,
    replace_file,
    sync_folder,
    writing,
)
from agentrl.observe.run_folder import step_name, step_of

_log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_PARTIAL = ".partial-"
_LEFTOVER = re.compile(r"\.partial-[0-9]{6,}(-replaced)?")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk."""

    step: int
    path: Path


class Checkpoints:
    """The checkpoints of a run.

    Only the newest `keep` are kept.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, step: int, write: Callable[[Path], None]) -> Checkpoint:
        """Write the checkpoint of a step, then delete the oldest ones beyond `keep`, and later ones.

        A run has later ones if it resumed from an earlier one because they were damaged.

        Args:
            step: Number of finished training steps.
            write: Writes the files into an empty folder.

        Raises:
            UsageError: the disk is full; earlier checkpoints are untouched.
        """
        final = self.folder / step_name(step)
        partial, replaced = (self.folder / f"{_PARTIAL}{step:06d}{kind}" for kind in ("", "-replaced"))
        try:
            with writing(final):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                write(partial)
                seal(partial)
                _set_aside(final)
                if final.exists():  # two renames and no deletion in between: a kill must leave one checkpoint
                    final.rename(replaced)
                partial.rename(final)
                sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._prune(step)
        return Checkpoint(step, final)

    def newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint; ``None`` if there are none. Damaged ones are skipped with a warning.

        Raises:
            UsageError: all checkpoints are damaged.
        """
        present = self.present()
        for checkpoint in reversed(present):
            problem = damage(checkpoint.path)
            if problem is None:
                return checkpoint
            _log.warning("skipped checkpoint %s: %s", checkpoint.path, problem)
        if present:
            raise UsageError(
                f"all checkpoints in {self.folder} are damaged",
                got=", ".join(checkpoint.path.name for checkpoint in present),
                expected="files that match their manifest.json",
                hint="restore one of them, or remove them to start again from step 0",
            )
        return None

    def present(self) -> list[Checkpoint]:
        """List all checkpoint folders by step, without checking them."""
        if not self.folder.is_dir():
            return []
        steps = ((step_of(path.name), path) for path in self.folder.iterdir() if _is_own_folder(path))
        found = (Checkpoint(step, path) for step, path in steps if step is not None)
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def _prune(self, step: int) -> None:
        present = self.present()
        kept = [checkpoint for checkpoint in present if checkpoint.step <= step][-self.keep :]
        for checkpoint in present:
            if checkpoint not in kept:
                shutil.rmtree(checkpoint.path)
        for path in self.folder.iterdir():
            if _LEFTOVER.fullmatch(path.name) and _is_own_folder(path):
                shutil.rmtree(path)


def _is_own_folder(path: Path) -> bool:
    """Return True for a folder, and False for a link to a folder."""
    return path.is_dir() and not path.is_symlink()


def _set_aside(path: Path) -> None:
    """Rename a user's file or link at the path of a checkpoint."""
    if (path.exists() or path.is_symlink()) and not _is_own_folder(path):
        path.rename(first_free(path.with_name(f"{path.name}-found-{number}") for number in count(1)))


def seal(folder: Path) -> None:
    """Sync every file to disk, then write the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(path)
    files_found = {path.relative_to(folder).as_posix(): _fingerprint(path) for path in files}
    replace_file(folder / MANIFEST, encode_record({"files": files_found}, indent=True))


def damage(folder: Path) -> str | None:
    """Describe the damage of a checkpoint; ``None`` if it is intact."""
    try:
        files = _listed_files((folder / MANIFEST).read_bytes())
    except (OSError, DamagedRecord):
        return "its manifest is missing or damaged"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"] or _fingerprint(path) != expected:
            return f"{name} is damaged"
    return None


def _listed_files(manifest: bytes) -> dict[str, dict[str, Any]]:
    """Return the files that a manifest lists.

    Raises:
        DamagedRecord: the manifest is damaged, or does not list files.
    """
    record = decode_record(manifest)
    files = record.get("files")
    if not isinstance(files, dict) or not files:
        raise DamagedRecord("it lists no files")
    if not all(isinstance(entry, dict) and entry.keys() == {"bytes", "crc32"} for entry in files.values()):
        raise DamagedRecord("it is not a list of files")
    return files


def _fingerprint(path: Path) -> dict[str, Any]:
    checksum, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
    return {"bytes": size, "crc32": checksum}


class CheckpointWriter:
    """Writer of checkpoints, one at a time.

    In the `background`, a thread writes while the run continues. `on_saved` is called in the caller's thread.

    Raises:
        UsageError: from `save`, `poll` and `wait`, if the disk is or was full.
    """

    def __init__(self, checkpoints: Checkpoints, *, background: bool, on_saved: Callable[[Checkpoint], None]) -> None:
        self.background = background
        self._checkpoints, self._on_saved = checkpoints, on_saved
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[Checkpoint] | None = None

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Write the checkpoint of a step, after the previous one is complete.

        Args:
            step: Number of finished training steps.
            write: Writes the files into a folder; in the background, from copies of the state.
        """
        self.wait()
        if self.background:
            self._running = self._thread.submit(self._checkpoints.save, step, write)
        else:
            self._on_saved(self._checkpoints.save(step, write))

    def poll(self) -> None:
        """Report a checkpoint whose writing has finished."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._running is not None:
            running, self._running = self._running, None
            self._on_saved(running.result())

    def close(self) -> None:
        """Wait for the writing thread; its error is only logged, because another exception may be propagating."""
        try:
            self.wait()
        except Exception:
            _log.exception("a checkpoint could not be written")
        self._thread.shutdown()
