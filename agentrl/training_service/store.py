"""Checkpoints of the service as atomically written folders: ``FOLDER/RUN/weights/NAME``.

Each contains ``model/`` (a peft or Hugging Face folder that every other command accepts), ``trainer.pt`` if it includes
the optimizer's state, ``service.json`` with its description, and a manifest with the checksums of all files.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError, shorten
from agentrl.observe.checkpoints import damage, seal
from agentrl.observe.files import sync_folder, writing
from agentrl.training_service.runs import RunSettings

_log = logging.getLogger(__name__)
TRAINING, SAMPLER = "weights", "sampler_weights"
EPHEMERAL = "ephemeral"
"""Folder of unnamed samplers' weights, which are deleted with their session."""
ABOUT, LOCK = "service.json", ".lock"
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,199}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PATH = re.compile(rf"tinker://({_RUN.pattern})/({TRAINING}|{SAMPLER})/({_NAME.pattern})")
_PARTIAL, _REPLACED = ".partial-", ".replaced-"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """Description of a checkpoint, stored in ``service.json``."""

    base_model: str
    settings: RunSettings
    updates: int
    created: str
    """Creation time in ISO 8601, UTC."""
    expires: str | None = None
    user_metadata: Mapping[str, str] | None = None
    run_metadata: Mapping[str, str] | None = None
    """The client's metadata of the run, which may have ended."""

    @classmethod
    def read(cls, folder: Path) -> CheckpointInfo:
        """Read the description from a checkpoint's folder."""
        data: dict[str, Any] = json.loads((folder / ABOUT).read_text())
        return cls(**{**data, "settings": RunSettings(**data["settings"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint on disk."""

    run: str
    kind: str
    name: str
    folder: Path
    about: CheckpointInfo

    @property
    def path(self) -> str:
        """Path of the checkpoint in the client's API."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def bytes(self) -> int:
        """Total size of its files."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


def now() -> datetime.datetime:
    """Return the current time in UTC."""
    return datetime.datetime.now(datetime.UTC)


class CheckpointStore:
    """All checkpoints of a service."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None

    def lock(self) -> None:
        """Lock the folder against other servers; the system releases the lock when this process ends.

        Raises:
            UsageError: another server uses the folder, or it is not writable.
        """
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.unlock()
            raise UsageError(
                f"another server uses the folder {self.folder}", hint="stop that server, or set another --folder"
            ) from error

    def unlock(self) -> None:
        """Release the lock; idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(
        self,
        run: str,
        kind: str,
        name: str,
        about: CheckpointInfo,
        write: Callable[[Path], None],
        *,
        overwrite: bool = False,
    ) -> StoredCheckpoint:
        """Write a checkpoint; `write` receives an empty folder and fills it.

        Raises:
            UsageError: the name is invalid or taken, or the disk is full.
        """
        if not _NAME.fullmatch(name):
            raise UsageError("invalid checkpoint name", got=shorten(name), expected="letters, digits, '.', '_' and '-'")
        final = self.folder / run / kind / name
        if final.exists() and not overwrite:
            raise UsageError(
                f"checkpoint {name} already exists", got=f"tinker://{run}/{kind}/{name}", hint="set overwrite=True"
            )
        partial, replaced = final.with_name(_PARTIAL + name), final.with_name(_REPLACED + name)
        with writing(final):
            for leftover in (partial, replaced):
                shutil.rmtree(leftover, ignore_errors=True)
            try:
                partial.mkdir(parents=True)
                write(partial)
                (partial / ABOUT).write_text(json.dumps(asdict(about)))
                seal(partial)
                if final.exists():
                    final.rename(replaced)
                partial.rename(final)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync_folder(final.parent)
            shutil.rmtree(replaced, ignore_errors=True)
        return StoredCheckpoint(run=run, kind=kind, name=name, folder=final, about=about)

    def find(self, path: str) -> StoredCheckpoint:
        """Find a checkpoint by its path.

        Raises:
            UsageError: the checkpoint does not exist, or its files are damaged.
        """
        parts = _PATH.fullmatch(path)
        if parts is None:
            raise UsageError("invalid checkpoint path", got=shorten(path), expected="tinker://RUN/weights/NAME")
        run, kind, name = parts.groups()
        folder = self.folder / run / kind / name
        if not folder.is_dir():
            replaced = folder.with_name(_REPLACED + name)
            if not replaced.is_dir():
                raise UsageError(f"no checkpoint found at {path}", hint="see tinker checkpoint list")
            replaced.rename(folder)  # the service was killed between the two renames of an overwrite
        if (problem := damage(folder)) is not None:
            raise UsageError(f"checkpoint {path} is damaged", got=problem, hint="use another one")
        return StoredCheckpoint(run=run, kind=kind, name=name, folder=folder, about=CheckpointInfo.read(folder))

    def list(self, run: str | None = None) -> list[StoredCheckpoint]:
        """List the checkpoints of one run or of all runs, oldest first, without checking for damage."""
        found = [saved for folder in self._runs(run) for saved in self._of_run(folder)]
        return sorted(found, key=lambda saved: saved.about.created)

    def _runs(self, run: str | None) -> Iterator[Path]:
        if run is not None:
            if _RUN.fullmatch(run) and (self.folder / run).is_dir():
                yield self.folder / run
        elif self.folder.is_dir():
            yield from (path for path in self.folder.iterdir() if path.is_dir() and _RUN.fullmatch(path.name))

    def _of_run(self, folder: Path) -> Iterator[StoredCheckpoint]:
        for kind in (TRAINING, SAMPLER):
            for path in (folder / kind).glob(f"[!.]*/{ABOUT}"):
                try:
                    about = CheckpointInfo.read(path.parent)
                except (OSError, ValueError, TypeError, KeyError):
                    _log.warning("checkpoint %s is skipped: its %s is damaged", path.parent, ABOUT)
                    continue
                yield StoredCheckpoint(
                    run=folder.name, kind=kind, name=path.parent.name, folder=path.parent, about=about
                )

    def delete(self, path: str) -> None:
        """Delete a checkpoint.

        Raises:
            UsageError: the checkpoint does not exist, or its files are damaged.
        """
        shutil.rmtree(self.find(path).folder)

    def sweep(self) -> None:
        """Delete expired checkpoints."""
        time = now().isoformat()
        for saved in self.list():
            if saved.about.expires is not None and saved.about.expires <= time:
                shutil.rmtree(saved.folder, ignore_errors=True)

    def forget_old(self, run: str, kind: str, *, keep: int) -> None:
        """Delete a run's checkpoints of one kind, except the last `keep` by name."""
        for folder in sorted((self.folder / run / kind).iterdir())[:-keep]:
            shutil.rmtree(folder)

    def forget_ephemeral(self, run: str | None = None) -> None:
        """Delete the unnamed samplers' weights of one run or of all runs."""
        for folder in self._runs(run):
            shutil.rmtree(folder / EPHEMERAL, ignore_errors=True)
