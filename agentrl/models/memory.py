"""Memory of this machine: how much there is, and how tensors on the CPU get theirs."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
LARGEST_KEPT = 32 << 20
"""Bytes of the largest block that comes from the heap: glibc allows no more."""
KEPT = (2 << 30) - 1
"""Free bytes at the end of the heap that are kept."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def memory_limit() -> int:
    """Bytes of memory that this process may use."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    return physical if limit == "max" else min(physical, int(limit))


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep the memory of freed tensors for the next ones; does nothing without glibc.

    glibc gives large blocks back to the kernel when they are freed, and gets them anew for the next operation, page by
    page and filled with zeros: a fifth of a training step of a model of 135 million parameters in float32.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, KEPT)
