"""Writing to disk: a full or unwritable disk becomes one clear message that stops the run."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WHEN_FULL = "make room, then run the command again; training goes on with: agentrl train --resume RUN"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Classify the errors of the enclosed writes to `path`.

    Raises:
        UsageError: the disk is full, or the path cannot be written.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in _FULL
        raise UsageError(
            f"cannot write {path}",
            got="no space left" if full else f"{error.strerror or error}",
            expected="free disk space" if full else "a writable folder",
            hint=_WHEN_FULL if full else None,
        ) from error


def check_writable(path: Path) -> None:
    """Check before long work that its result can be written to `path` at the end; makes the folder.

    Raises:
        UsageError: as `writing`.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        target = path if path.exists() else path.parent
        if not os.access(target, os.W_OK):  # says no, and not why
            reason = errno.EROFS if os.statvfs(target).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(reason, os.strerror(reason))


def write_fully(descriptor: int, data: bytes) -> None:
    """Write all of `data`; a short write goes on until the system says why."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(path: Path, data: bytes) -> None:
    """Write a whole file so that readers see the old one or the new one, and so that it survives a power cut.

    Raises:
        UsageError: as `writing`.
    """
    temporary = path.with_name(path.name + ".partial")
    with writing(path):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_fully(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
