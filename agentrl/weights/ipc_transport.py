"""Weights that servers read out of the trainer's memory: for servers on the trainer's GPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from agentrl.errors import TrainingError
from agentrl.server import InferenceServer, SharedTensors
from agentrl.weights.buckets import Bucket, pack, unpack
from agentrl.weights.shared_run import open_handle, pickled, share
from agentrl.weights.transport import PreparedWeights, Transport


class IpcTransport(Transport):
    """Copies tensors into buckets beside them, and tells servers where those are.

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
        """Copy the tensors, in a thread.

        Raises:
            TrainingError: no room.
        """
        began = time.perf_counter()
        try:
            buckets = await asyncio.to_thread(self._shared, weights)
        except RuntimeError as error:
            raise TrainingError(
                "the weights cannot be set apart for the servers",
                got=str(error)[:200],
                expected="room for two versions beside the trainer's own",
                hint="make room, or set engine.transport: shared_memory",
            ) from error
        return _OpenedTensors(buckets, version=version, seconds=time.perf_counter() - began)

    def _shared(self, weights: Mapping[str, Tensor]) -> list[Bucket]:
        device = next(iter(weights.values())).device
        buckets = pack(weights, bucket_bytes=self._bucket_bytes, device=device)
        for bucket in buckets:
            share(bucket.run)
        return buckets


class _OpenedTensors(PreparedWeights):
    """Buckets that servers open, one at a time."""

    def __init__(self, buckets: Sequence[Bucket], *, version: int, seconds: float) -> None:
        super().__init__(version=version, size=sum(bucket.run.nbytes for bucket in buckets), seconds=seconds)
        self._buckets = buckets

    async def give_to(self, server: InferenceServer) -> None:
        """Tell it where they are."""
        if self._buckets[0].run.is_cuda:
            await asyncio.to_thread(torch.cuda.synchronize, self._buckets[0].run.device)
        shared = [
            SharedTensors(
                layout=bucket.layout,
                handle=partial(open_handle, bucket.run),
                part=partial(asyncio.to_thread, pickled, bucket),
            )
            for bucket in self._buckets
        ]
        await server.open_weights(shared, self.version)

    def tensors(self) -> Mapping[str, Tensor]:
        """Those in the buckets."""
        return unpack(self._buckets)
