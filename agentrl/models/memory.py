"""Memory of this machine: its limit, and the allocation of tensors on the CPU."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
MAX_HEAP_BLOCK = 32 << 20
"""Size in bytes of the largest block that is allocated from the heap; the maximum that glibc allows."""
KEPT = (2 << 30) - 1
"""Maximum number of free bytes at the top of the heap that are not returned to the kernel."""
FREED_SHARE = 8
"""All ranks of a run together may keep 1 / FREED_SHARE of the machine's memory between steps."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def memory_limit() -> int:
    """Return the number of bytes of memory that this process may use."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    return physical if limit == "max" else min(physical, int(limit))


@functools.cache
def keep_freed_memory() -> None:
    """Keep the memory of freed tensors in this process for new tensors; without glibc, this does nothing.

    By default, glibc returns large freed blocks to the kernel and requests zeroed pages again for the next operation.
    That takes a fifth of the training step of a float32 model with 135 million parameters.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, MAX_HEAP_BLOCK)
        mallopt(_TRIM_THRESHOLD, KEPT)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    facts = Path("/proc/self/statm")
    return int(facts.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if facts.is_file() else 0


class FreedMemory:
    """Memory of freed tensors that `keep_freed_memory` keeps, and that other processes may need between steps.

    A training step of a model with 0.5 billion parameters frees 7 GB; after `release`, the next step needs about a
    second to allocate them again.

    Args:
        most: Growth of the process in bytes up to which `release` does nothing.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._resident = 0

    def release(self) -> None:
        """Return the memory of freed tensors to the kernel if the process grew; without glibc, this does nothing."""
        if resident_bytes() - self._resident < self.most:
            return
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        self._resident = resident_bytes()
