"""Which accelerators torch can use in this process."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A GPU as torch sees it."""

    device: str
    name: str
    memory_bytes: int


def accelerators() -> list[Accelerator]:
    """The GPUs that torch can use; empty on a machine without, or with a torch built for the CPU."""
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        Accelerator(device=f"cuda:{index}", name=found.name, memory_bytes=found.total_memory)
        for index, found in enumerate(properties)
    ]


def torch_build() -> str:
    """Torch's version and what it was built for, for example ``2.9.1 for CUDA 12.8``."""
    cuda = torch.version.cuda
    return f"{torch.__version__} for {f'CUDA {cuda}' if cuda else 'the CPU'}"


def use_gpu(position: int) -> None:
    """Let ``cuda`` mean this GPU in this process, where there are some.

    Args:
        position: Among those that the process may use.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(position)
