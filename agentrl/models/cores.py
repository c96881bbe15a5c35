"""Assignment of CPU cores to the engine and the trainer on one machine (``engine.cpus``, ``trainer.cpus``).

    trainer.cpus ─► rank 0: its training thread; other ranks: their processes, in equal parts
    engine.cpus  ─► launched servers: their processes, in equal parts; local engine: all other threads of this process

Without these settings, engine and trainer compete for the same cores, and each operation waits for its slowest thread.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress


def usable_cores() -> frozenset[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def divide_cores(cores: Sequence[int] | None, count: int) -> list[tuple[int, ...]]:
    """Divide cores among processes, in order and as evenly as possible; without cores, all parts are empty."""
    cores = cores or ()
    bounds = [index * len(cores) // count for index in range(count + 1)]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(bounds)]


@contextmanager
def pinned_thread(cores: Sequence[int]) -> Iterator[None]:
    """Pin the calling thread, and the threads and processes that it starts in the block, to `cores` (all if empty)."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def pinned_process(cores: Sequence[int]) -> Iterator[None]:
    """Pin all threads of this process, and those that they start in the block, to `cores` (all if empty)."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    _pin_all(cores)
    try:
        yield
    finally:
        _pin_all(before)


def _pin_all(cores: Iterable[int]) -> None:
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cores)
