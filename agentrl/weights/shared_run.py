"""Runs of bytes that other processes of this machine open where they are: on a GPU by CUDA's handles, else by the name
of a file in memory.

A handle is for one process, which gives it back by letting go of what it opened.
"""

from __future__ import annotations

import base64
import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from agentrl.weights.buckets import Bucket

REDUCTIONS: Any = reductions
"""Torch leaves it untyped."""
DEVICE_ARGUMENT = 6
"""Place of the GPU among the arguments of torch's `rebuild_cuda_tensor`."""


def share(run: Tensor) -> None:
    """Move a run on the CPU into memory that processes share; GPU memory is, as it is.

    Raises:
        RuntimeError: no room.
    """
    if not run.is_cuda:
        _place(run.untyped_storage())


def _place(storage: Any) -> tuple[bytes, bytes, int]:
    """Torch's manager of a storage's file, its name, and its size."""
    manager, name, size = storage._share_filename_cpu_()
    return manager, name, size


def open_handle(run: Tensor) -> dict[str, Any]:
    """What another process needs to open a run, in JSON; bytes are base64.

    Args:
        run: (bytes,), uint8, with a storage of its own.
    """
    storage: Any = run.untyped_storage()
    if not run.is_cuda:
        manager, name, size = _place(storage)
        return {"manager": manager.decode(), "name": name.decode(), "size": size}
    _, memory, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    return {
        "gpu": gpu_of(run),
        "memory": _base64(memory),
        "size": size,
        "offset": offset,
        "counter": _base64(counter),
        "counter_offset": counter_offset,
        "event": _base64(event),
        "waits": waits,
    }


def gpu_of(tensor: Tensor) -> str:
    """Identity of the GPU that holds a tensor, whatever number a process gives it."""
    return str(torch.cuda.get_device_properties(tensor.device).uuid)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def pickled(bucket: Bucket) -> str:
    """Base64 of a pickled list of names and tensors that says where the tensors are, as SGLang reads it.

    It must be opened once: what nobody opens is kept, on the CPU until this process ends.
    """
    stream = io.BytesIO()
    _HandlePickler(stream).dump(list(bucket.tensors()))
    return _base64(stream.getvalue())


class _HandlePickler(ForkingPickler):
    """Names a GPU by its identity, as SGLang does, and memory by a file's name: descriptors are for child processes."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            rebuild, arguments = REDUCTIONS.reduce_tensor(value)
            return rebuild, (*arguments[:DEVICE_ARGUMENT], gpu_of(value), *arguments[DEVICE_ARGUMENT + 1 :])
        if isinstance(value, torch.UntypedStorage):
            storage: Any = value
            place = _place(storage)
            storage._shared_incref()  # for the process that opens it
            return REDUCTIONS.rebuild_storage_filename, (torch.UntypedStorage, *place)
        return NotImplemented
