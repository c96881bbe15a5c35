"""Weights by broadcast: a process group of the trainer and the workers of one server, for each server.

One group per server, so that a server that dies in the middle breaks its own update and nobody else's, and one that
comes back needs no new meeting of all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from agentrl.server import InferenceServer
from agentrl.weights.buckets import Bucket, pack, unpack
from agentrl.weights.process_group import TrainerGroup
from agentrl.weights.transport import PreparedWeights, Transport

TIMEOUT_S = 60.0
"""Deadline of the meeting of a group, and of the broadcast of one bucket: a server that hangs is given up then."""

_log = logging.getLogger(__name__)


class CollectiveTransport(Transport):
    """Copies tensors into buckets on the CPU, and broadcasts one bucket after the other.

    Over NCCL when the trainer's tensors are on a GPU, else over gloo.

    Args:
        bucket_bytes: Most bytes of a broadcast.
        timeout_s: Deadline of a meeting, and of a broadcast.
    """

    def __init__(self, *, bucket_bytes: int, timeout_s: float = TIMEOUT_S) -> None:
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._groups: WeakKeyDictionary[InferenceServer, TrainerGroup] = WeakKeyDictionary()

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> PreparedWeights:
        """Copy the tensors, in a thread."""
        began = time.perf_counter()
        device = next(iter(weights.values())).device
        buckets = await asyncio.to_thread(pack, weights, bucket_bytes=self._bucket_bytes)
        return _BroadcastWeights(self, buckets, device, version=version, seconds=time.perf_counter() - began)

    async def send(
        self, server: InferenceServer, buckets: Sequence[Bucket], device: torch.device, version: int
    ) -> None:
        """Broadcast buckets to one server, in the group that it has, or a new one; a group that failed is gone."""
        group = self._groups.get(server) or await self._met(server, device)

        async def broadcast(number: int) -> None:
            await group.broadcast(buckets[number].run)

        try:
            await server.receive_weights([bucket.layout for bucket in buckets], group.info, broadcast, version)
        except BaseException:
            if self._groups.get(server) is group:
                del self._groups[server]
            group.close()
            raise

    async def _met(self, server: InferenceServer, device: torch.device) -> TrainerGroup:
        group = TrainerGroup(server.url, workers=await server.workers(), device=device, timeout_s=self._timeout_s)
        try:
            await asyncio.gather(server.join_group(group.info), group.meet())
        except BaseException:
            group.close()
            raise
        self._groups[server] = group
        return group

    async def close(self) -> None:
        """Leave all groups, with the servers. Groups that broke are left to the servers, which may hang in them."""
        groups = dict(self._groups)
        self._groups.clear()
        leaving = (server.leave_group(group.info) for server, group in groups.items())
        for outcome in await asyncio.gather(*leaving, return_exceptions=True):
            if outcome is not None:
                _log.info("a server keeps the group of its updates: %s", outcome)
        for group in groups.values():
            group.close()


class _BroadcastWeights(PreparedWeights):
    """Buckets that are broadcast to each server in its own group."""

    def __init__(
        self,
        transport: CollectiveTransport,
        buckets: Sequence[Bucket],
        device: torch.device,
        *,
        version: int,
        seconds: float,
    ) -> None:
        super().__init__(version=version, size=sum(bucket.run.nbytes for bucket in buckets), seconds=seconds)
        self._transport = transport
        self._buckets = buckets
        self._device = device

    async def give_to(self, server: InferenceServer) -> None:
        """Broadcast them."""
        await self._transport.send(server, self._buckets, self._device, self.version)

    def tensors(self) -> Mapping[str, Tensor]:
        """Those in the buckets."""
        return unpack(self._buckets)
