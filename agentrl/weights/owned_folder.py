"""A folder that belongs to a running process, and is cleared away by others once that process is gone.

Its name carries the process id for people who look; a locked file beside it tells whether the owner lives, which holds
across containers that share a memory file system and do not see one another's processes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

PREFIX = "agentrl-weights-"
LOCK = ".lock"


class OwnedFolder:
    """Makes a folder of its own under `root`, after it has cleared away what dead processes left there.

    Args:
        root: Exists, or is made.

    Attributes:
        path: The folder.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        clear_abandoned(root)
        self.path = root / f"{PREFIX}{os.getpid()}-{uuid4().hex[:8]}"
        self._lock = _locked(lock_of(self.path))
        self.path.mkdir()
        self._remove = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def close(self) -> None:
        """Remove the folder; also done when the process ends in any way that lets Python finish. Idempotent."""
        self._remove()


def lock_of(folder: Path) -> Path:
    """The file whose lock says that a folder's owner lives."""
    return folder.with_name(folder.name + LOCK)


def clear_abandoned(root: Path) -> list[Path]:
    """Remove folders whose owner is gone; those that were removed. What other users left is left alone."""
    removed = []
    for folder in {Path(str(path).removesuffix(LOCK)) for path in root.glob(f"{PREFIX}*")}:
        with suppress(OSError):  # locked by its owner, or by somebody who clears it, or not ours
            lock = _locked(lock_of(folder))
            _remove(folder, lock, os.getpid())
            removed.append(folder)
    return sorted(removed)


def _locked(path: Path) -> int:
    """A file, made if need be and locked; raises `BlockingIOError` when another process holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # somebody cleared the file away between opening and locking it


def _remove(folder: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child ends
        return
    shutil.rmtree(folder, ignore_errors=True)
    lock_of(folder).unlink(missing_ok=True)
    os.close(lock)
