"""Measurement of training steps: wall-clock and CPU seconds, and the growth of memory."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median


@dataclass(slots=True)
class Side:
    """One side of a comparison, with the measurements of its steps."""

    step: Callable[[], None]
    cpu_seconds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    grown_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    """Peak memory of the whole process."""

    def measure(self) -> None:
        """Measure a step."""
        _give_back()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # reset the peak
        start, start_cpu = time.perf_counter(), time.process_time()
        self.step()
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - start_cpu)
        self.peak_bytes.append(_resident("VmHWM"))
        self.grown_bytes.append(self.peak_bytes[-1] - before)

    def figures(self, tokens: int) -> dict[str, float]:
        """Return the medians."""
        return {
            "tokens_per_cpu_s": tokens / median(self.cpu_seconds),
            "tokens_per_s": tokens / median(self.seconds),
            "peak_megabytes": median(self.grown_bytes) / 2**20,
            "process_megabytes": median(self.peak_bytes) / 2**20,
        }


def _give_back() -> None:
    """Return freed memory to the system, so that it is not counted."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
