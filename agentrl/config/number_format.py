"""Fastest data type of this machine, found without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeAlias

NumberFormat: TypeAlias = Literal["float32", "bfloat16"]
AUTO = "auto"
CPU_INFO = Path("/proc/cpuinfo")
GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU flags for bfloat16 multiplication, on x86 and on ARM."""


def has_gpu() -> bool:
    """Return True if this machine has an NVIDIA or AMD GPU driver, and its GPUs are not hidden."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(path.exists() for path in GPU_DRIVERS)


def cpu_has_bfloat16() -> bool:
    """Return True if the CPU multiplies in bfloat16; without such instructions, bfloat16 is many times slower."""
    try:
        lines = CPU_INFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not _BFLOAT16_FLAGS.isdisjoint(flags.split())


def fastest_format(device: str) -> NumberFormat:
    """Return bfloat16 for GPUs and for CPUs that multiply in bfloat16, otherwise float32.

    Args:
        device: Value of ``model.device``: ``cpu``, ``cuda``, ``cuda:1`` or ``auto``.
    """
    on_gpu = device.startswith("cuda") or (device == AUTO and has_gpu())
    return "bfloat16" if on_gpu or cpu_has_bfloat16() else "float32"
