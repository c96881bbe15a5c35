"""Weights in the bodies of requests: for SGLang servers that share no file system with the trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from agentrl.server import InferenceServer
from agentrl.weights.buckets import Bucket, pack, unpack
from agentrl.weights.transport import PreparedWeights, Transport


class TensorTransport(Transport):
    """Copies tensors into buckets, and sends one bucket per request.

    Args:
        bucket_bytes: Most bytes of tensors in a request; it is a third longer.
    """

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> PreparedWeights:
        """Copy the tensors, in a thread."""
        began = time.perf_counter()
        buckets = await asyncio.to_thread(pack, weights, bucket_bytes=self._bucket_bytes)
        return _SentTensors(buckets, version=version, seconds=time.perf_counter() - began)


class _SentTensors(PreparedWeights):
    """Buckets that are encoded anew for each server, one at a time: memory for one request suffices."""

    def __init__(self, buckets: Sequence[Bucket], *, version: int, seconds: float) -> None:
        super().__init__(version=version, size=sum(bucket.run.nbytes for bucket in buckets), seconds=seconds)
        self._buckets = buckets

    async def give_to(self, server: InferenceServer) -> None:
        """Send them."""
        parts = [partial(asyncio.to_thread, bucket.encoded) for bucket in self._buckets]
        await server.load_tensors(parts, self.version)

    def tensors(self) -> Mapping[str, Tensor]:
        """Those in the buckets."""
        return unpack(self._buckets)
