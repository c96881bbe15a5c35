"""Notices that a file is opened, by whatever process and whether or not anything is shown of it. Linux only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

IN_OPEN = 0x20
_EVENTS_BYTES = 4096


class WatchedFile:
    """A file that is watched.

    Args:
        descriptor: Of inotify; ``None`` where there is none, and nothing is noticed.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def was_opened(self) -> bool:
        """Whether it was opened since the last time."""
        try:
            return self._descriptor is not None and bool(os.read(self._descriptor, _EVENTS_BYTES))
        except BlockingIOError:
            return False


@contextmanager
def watched(path: Path) -> Iterator[WatchedFile]:
    """Watch a file."""
    descriptor = _inotify(path)
    try:
        yield WatchedFile(descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _inotify(path: Path) -> int | None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "inotify_init1"):
        return None
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(path), IN_OPEN) < 0:
        os.close(descriptor)
        return None
    return descriptor
