"""Weights that servers on the trainer's machine read from its memory, or receive in request bodies (SGLang)."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from agentrl.engine import InferenceServer, SharedTensors
from agentrl.errors import TrainingError
from agentrl.errors.foreign import run_in_own_thread
from agentrl.weights.contract import PreparedWeights, Transport
from agentrl.weights.tensors import Bucket, PreparedBuckets, pack

REDUCTIONS: Any = reductions
"""Untyped alias of a module without types."""
DEVICE_ARGUMENT = 6
"""Index of the GPU among the arguments of torch's `rebuild_cuda_tensor`."""


def share(run: Tensor) -> None:
    """Move bytes on the CPU to shared memory; GPU memory can be shared already."""
    if not run.is_cuda:
        _place(run.untyped_storage())


def _place(storage: Any) -> tuple[bytes, bytes, int]:
    """Share a storage by a file; return the handle of torch's manager, the file's name, and its size."""
    manager, name, size = storage._share_filename_cpu_()
    return manager, name, size


def open_handle(run: Tensor) -> dict[str, Any]:
    """Make a JSON handle, with base64 bytes, to open `run`, uint8 [bytes] with its own storage, in another process."""
    storage: Any = run.untyped_storage()
    if not run.is_cuda:
        manager, name, size = _place(storage)
        return {"manager": manager.decode(), "name": name.decode(), "size": size}
    _, memory, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    return {
        "gpu": gpu_uuid(run),
        "memory": _base64(memory),
        "size": size,
        "offset": offset,
        "counter": _base64(counter),
        "counter_offset": counter_offset,
        "event": _base64(event),
        "waits": waits,
    }


def gpu_uuid(tensor: Tensor) -> str:
    """Return the UUID of the GPU that holds a tensor; GPU numbers may differ between processes."""
    return str(torch.cuda.get_device_properties(tensor.device).uuid)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def pickle_handles(bucket: Bucket) -> str:
    """Pickle a list of names and handles of tensors in SGLang's format, and encode it as base64.

    A server must open it exactly once; otherwise its memory is not freed, on the CPU until this process ends.
    """
    stream = io.BytesIO()
    _HandlePickler(stream).dump(list(bucket.tensors()))
    return _base64(stream.getvalue())


class _HandlePickler(ForkingPickler):
    """Pickler that identifies a GPU by its UUID, like SGLang, and memory by a file name.

    Torch's default, a file descriptor, works only for child processes.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            rebuild, arguments = REDUCTIONS.reduce_tensor(value)
            return rebuild, (*arguments[:DEVICE_ARGUMENT], gpu_uuid(value), *arguments[DEVICE_ARGUMENT + 1 :])
        if isinstance(value, torch.UntypedStorage):
            storage: Any = value
            place = _place(storage)
            storage._shared_incref()  # the reference of the process that opens it
            return REDUCTIONS.rebuild_storage_filename, (torch.UntypedStorage, *place)
        return NotImplemented


class IpcTransport(Transport):
    """Transport through shared memory: tensors are copied to buckets on their device, which servers open.

    GPU tensors do not leave the GPU; its memory holds one copy between syncs, for returning servers, and two during a
    sync. A bucket that a server did not open, or had open when it died, is not freed. On the CPU, buckets are in shared
    memory.

    Args:
        bucket_bytes: Maximum number of bytes of the tensors in a request; a server may keep several buckets open until
            its update ends.
    """

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> PreparedWeights:
        """Copy the tensors in a thread."""
        began = time.perf_counter()
        try:
            buckets = await run_in_own_thread(self._make_shared, weights)
        except RuntimeError as error:
            raise TrainingError(
                "the weights cannot be copied for the servers",
                got=str(error)[:200],
                expected="memory for two copies in addition to the trainer's weights",
                hint="free memory, or set engine.transport=shared_memory",
            ) from error
        return PreparedBuckets(buckets, _open_at, version=version, seconds=time.perf_counter() - began)

    def _make_shared(self, weights: Mapping[str, Tensor]) -> list[Bucket]:
        device = next(iter(weights.values())).device
        buckets = pack(weights, bucket_bytes=self._bucket_bytes, device=device)
        for bucket in buckets:
            share(bucket.run)
        return buckets


async def _open_at(server: InferenceServer, buckets: Sequence[Bucket], version: int) -> None:
    """Make a server open the buckets, one at a time."""
    if buckets[0].run.is_cuda:
        await run_in_own_thread(torch.cuda.synchronize, buckets[0].run.device)
    shared = [
        SharedTensors(
            layout=bucket.layout,
            handle=partial(open_handle, bucket.run),
            part=partial(run_in_own_thread, pickle_handles, bucket),
        )
        for bucket in buckets
    ]
    await server.open_weights(shared, version)


class TensorTransport(Transport):
    """Transport in request bodies, each with at most `bucket_bytes` of tensors."""

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> PreparedWeights:
        """Copy the tensors in a thread."""
        began = time.perf_counter()
        buckets = await run_in_own_thread(pack, weights, bucket_bytes=self._bucket_bytes)
        return PreparedBuckets(buckets, _send_to, version=version, seconds=time.perf_counter() - began)


async def _send_to(server: InferenceServer, buckets: Sequence[Bucket], version: int) -> None:
    """Encode and send one bucket at a time, so that only one request is in memory."""
    parts = [partial(run_in_own_thread, bucket.encode) for bucket in buckets]
    await server.load_tensors(parts, version)
