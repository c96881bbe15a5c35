"""Memory of tensors on the CPU: what was freed is kept for the next tensors.

glibc gives large blocks back to the kernel when they are freed, and gets them anew, page by page and filled with zeros,
for the next operation: a fifth of a training step of a model of 135 million parameters.
"""

from __future__ import annotations

import ctypes
import functools
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST_KEPT = 32 << 20
"""Bytes of the largest block that comes from the heap: glibc allows no more."""
KEPT = (2 << 30) - 1
"""Free bytes at the end of the heap that are kept."""


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep the memory of freed tensors; does nothing where the C library is another than glibc."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, KEPT)
