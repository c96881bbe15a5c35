"""Clock for deadlines of user code, which advances slowly while that code waits for a core of a busy machine.

Linux counts for each thread the time that it could have run but had no core (``/proc/PID/task/TID/schedstat``). Other
systems do not; there, the clock is the monotonic one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

LEAST_SHARE = 0.05
"""Minimum speed of the clock, so that code which never returns misses its deadline on any machine."""
_PROC = Path("/proc")


class FairClock:
    """Clock in seconds; someone must call `tick` several times per second."""

    def __init__(self) -> None:
        self._waited: Mapping[tuple[int, str], float] = {}
        self._state = (time.monotonic(), 0.0)

    def tick(self) -> float:
        """Advance the clock by the time since the last tick, without waits for a core; return its time."""
        last, now = self._state
        waited, wall = dict(_waits()), time.monotonic()
        # The longest wait of a thread, and not their sum: threads wait at the same time.
        longest = max((wait - self._waited.get(thread, wait) for thread, wait in waited.items()), default=0.0)
        passed = wall - last
        self._waited, self._state = waited, (wall, now + max(passed - longest, LEAST_SHARE * passed))
        return self._state[1]

    def read(self) -> float:
        """Return the time, with all of the time since the last tick; safe in any thread."""
        last, now = self._state
        return now + time.monotonic() - last


def _waits() -> Iterator[tuple[tuple[int, str], float]]:
    """Yield the threads of this process and its descendants, and the seconds for which each has waited for a core."""
    left, seen = [os.getpid()], set[int]()
    while left:
        pid = left.pop()
        if pid in seen:
            continue
        seen.add(pid)
        for thread, (waited, children) in _threads(pid).items():
            left += children
            yield (pid, thread), waited


def _threads(pid: int) -> Mapping[str, tuple[float, list[int]]]:
    """Return the seconds of waiting and the children of each thread of a process; empty if the system has no counts."""
    tasks = _PROC / str(pid) / "task"
    found = {}
    for thread in _names(tasks):
        counts = _words(tasks / thread / "schedstat")
        if len(counts) == 3:
            found[thread] = (int(counts[1]) / 1e9, [int(child) for child in _words(tasks / thread / "children")])
    return found


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # no Linux, or a process that has ended
        return []


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:  # a thread that has ended, or a kernel without such a file
        return []
