"""What this process holds from the system: open files, threads, child processes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

_PATIENCE_S = 2.0
"""Seconds for threads and processes that were told to end."""
_OPEN_FILES = Path("/proc/self/fd"), Path("/dev/fd")
_TASKS = Path("/proc/self/task")


class Holdings(NamedTuple):
    """Numbers of things; 0 where the system does not tell."""

    open_files: int
    threads: int
    processes: int

    def over(self, before: Holdings) -> str:
        """What there is more of than before, in words; empty when there is nothing."""
        extra = [now - then for now, then in zip(self, before, strict=True)]
        names = (name.replace("_", " ") for name in self._fields)
        return ", ".join(f"{count} {name}" for count, name in zip(extra, names, strict=True) if count > 0)


def holdings() -> Holdings:
    """What there is now."""
    folder = next((path for path in _OPEN_FILES if path.is_dir()), None)
    return Holdings(
        open_files=len(os.listdir(folder)) if folder else 0,
        threads=threading.active_count(),
        processes=sum(len(path.read_text().split()) for path in _TASKS.glob("*/children")),
    )


def settled_holdings(before: Holdings) -> Holdings:
    """What there is now; if it is more than before, what there is after some patience."""
    end = time.perf_counter() + _PATIENCE_S
    now = holdings()
    while now.over(before) and time.perf_counter() < end:
        time.sleep(0.02)
        now = holdings()
    return now


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    facts = Path("/proc/self/statm")
    return int(facts.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if facts.is_file() else 0
