"""Torch's profiler over all threads of this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

MAX_OPERATIONS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTime:
    """Time of one of torch's operations in all threads."""

    name: str
    calls: int
    self_ms: float
    """Milliseconds without the operations that it calls, on the CPU."""
    device_ms: float
    """Milliseconds on the accelerator."""


class TorchProfile:
    """Profile of torch's operations; it begins at construction."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profile = torch.profiler.profile(activities=activities, experimental_config=settings)
        self._profile.start()

    def stop(self, trace: Path) -> list[OperationTime]:
        """End the profile, write it as a Chrome trace, and return the operations with the largest own time."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(trace))
        found = [
            OperationTime(
                name=event.key,
                calls=event.count,
                self_ms=event.self_cpu_time_total / 1000,
                device_ms=getattr(event, "self_device_time_total", 0.0) / 1000,
            )
            for event in self._profile.key_averages()
        ]
        return sorted(found, key=lambda one: -max(one.self_ms, one.device_ms))[:MAX_OPERATIONS]
