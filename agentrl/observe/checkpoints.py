"""Checkpoints as folders that are whole or absent.

A checkpoint is written into a hidden folder, made durable, and renamed: ``checkpoints/step-000010``. Its
``manifest.json`` holds the size and checksum of every file; a folder that does not match it is passed over with a
message, and the one before is used.
"""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agentrl.errors import UsageError
from agentrl.observe.disk import replace_file, sync_folder, writing

_log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_PARTIAL = ".partial-"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    step: int
    path: Path


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: The run's ``checkpoints``.
        keep: How many of the newest stay.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, step: int, write: Callable[[Path], None]) -> Checkpoint:
        """Write the checkpoint of a step, then delete the oldest ones beyond `keep`.

        Args:
            step: Training steps done.
            write: Fills the empty folder that it is given.

        Raises:
            UsageError: the disk is full; the checkpoints before are untouched.
        """
        final = self.folder / f"step-{step:06d}"
        partial, replaced = (self.folder / f"{_PARTIAL}{step:06d}{kind}" for kind in ("", "-replaced"))
        try:
            with writing(final):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                write(partial)
                _seal(partial)
                if final.exists():  # two renames, not a deletion in between: nobody must be killed without either
                    final.rename(replaced)
                partial.rename(final)
                sync_folder(self.folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._prune()
        return Checkpoint(step, final)

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; broken ones are named in a warning. ``None`` when there are none at all.

        Raises:
            UsageError: all are broken.
        """
        present = self.present()
        for checkpoint in reversed(present):
            problem = _problem(checkpoint.path)
            if problem is None:
                return checkpoint
            _log.warning("checkpoint %s is passed over: %s", checkpoint.path, problem)
        if present:
            raise UsageError(
                f"no checkpoint in {self.folder} is whole",
                got=", ".join(checkpoint.path.name for checkpoint in present),
                expected="files as their manifest.json lists them",
                hint="restore one of them, or remove them to begin again from step 0",
            )
        return None

    def present(self) -> list[Checkpoint]:
        """All checkpoint folders by step, unchecked."""
        return sorted(
            (Checkpoint(int(path.name.removeprefix("step-")), path) for path in self.folder.glob("step-*")),
            key=lambda checkpoint: checkpoint.step,
        )

    def _prune(self) -> None:
        for checkpoint in self.present()[: -self.keep]:
            shutil.rmtree(checkpoint.path)
        for leftover in self.folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover)


def _seal(folder: Path) -> None:
    """Make every file durable and write the manifest last."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(path)
    manifest = {path.relative_to(folder).as_posix(): _fingerprint(path) for path in files}
    replace_file(folder / _MANIFEST, orjson.dumps(manifest, option=orjson.OPT_INDENT_2))


def _problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words."""
    try:
        manifest = orjson.loads((folder / _MANIFEST).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return "its manifest is missing or broken"
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"] or _fingerprint(path) != expected:
            return f"{name} is damaged"
    return None


def _fingerprint(path: Path) -> dict[str, Any]:
    checksum, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
    return {"bytes": size, "crc32": checksum}
