"""Weights that servers on the trainer's machine read out of its memory, or get in the bodies of requests (SGLang)."""

from __future__ import annotations

import asyncio
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
from agentrl.weights.contract import PreparedWeights, Transport
from agentrl.weights.tensors import Bucket, PreparedBuckets, pack

REDUCTIONS: Any = reductions
"""Torch leaves it untyped."""
DEVICE_ARGUMENT = 6
"""Place of the GPU among the arguments of torch's `rebuild_cuda_tensor`."""


def share(run: Tensor) -> None:
    """Move a run on the CPU into memory that processes share, as GPU memory already is."""
    if not run.is_cuda:
        _place(run.untyped_storage())


def _place(storage: Any) -> tuple[bytes, bytes, int]:
    """Torch's manager of a storage's file, its name, and its size."""
    manager, name, size = storage._share_filename_cpu_()
    return manager, name, size


def open_handle(run: Tensor) -> dict[str, Any]:
    """Return JSON with which another process opens a run (uint8[bytes] with a storage of its own); bytes are base64."""
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
    """Base64 of a pickled list of names and handles of tensors, as SGLang reads it.

    It must be opened once; otherwise its memory is kept, on the CPU until this process ends.
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


class IpcTransport(Transport):
    """Transport through shared memory: tensors are copied into buckets on their device, which servers open.

    On a GPU nothing leaves it: its memory holds one copy between syncs, for servers that come back, and two during a
    sync. A bucket that a server has not opened, or still had open when it died, is not freed. On a CPU the buckets are
    in memory that processes share.

    Args:
        bucket_bytes: Most bytes of tensors that a request names; a server may keep several buckets open until its
            update ends.
    """

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> PreparedWeights:
        """Copy the tensors, in a thread."""
        began = time.perf_counter()
        try:
            buckets = await asyncio.to_thread(self._shared, weights)
        except RuntimeError as error:
            raise TrainingError(
                "the weights cannot be set apart for the servers",
                got=str(error)[:200],
                expected="room for two versions besides the trainer's own",
                hint="make room, or set engine.transport: shared_memory",
            ) from error
        return PreparedBuckets(buckets, _open_at, version=version, seconds=time.perf_counter() - began)

    def _shared(self, weights: Mapping[str, Tensor]) -> list[Bucket]:
        device = next(iter(weights.values())).device
        buckets = pack(weights, bucket_bytes=self._bucket_bytes, device=device)
        for bucket in buckets:
            share(bucket.run)
        return buckets


async def _open_at(server: InferenceServer, buckets: Sequence[Bucket], version: int) -> None:
    """Let a server open the buckets, one at a time."""
    if buckets[0].run.is_cuda:
        await asyncio.to_thread(torch.cuda.synchronize, buckets[0].run.device)
    shared = [
        SharedTensors(
            layout=bucket.layout,
            handle=partial(open_handle, bucket.run),
            part=partial(asyncio.to_thread, pickled, bucket),
        )
        for bucket in buckets
    ]
    await server.open_weights(shared, version)


class TensorTransport(Transport):
    """Transport in the bodies of requests, each with at most `bucket_bytes` of tensors."""

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> PreparedWeights:
        """Copy the tensors, in a thread."""
        began = time.perf_counter()
        buckets = await asyncio.to_thread(pack, weights, bucket_bytes=self._bucket_bytes)
        return PreparedBuckets(buckets, _send_to, version=version, seconds=time.perf_counter() - began)


async def _send_to(server: InferenceServer, buckets: Sequence[Bucket], version: int) -> None:
    """Send buckets that are encoded anew for each server, one at a time: memory for one request suffices."""
    parts = [partial(asyncio.to_thread, bucket.encoded) for bucket in buckets]
    await server.load_tensors(parts, version)
