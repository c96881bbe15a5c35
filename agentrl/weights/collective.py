"""Weight transfer by broadcast, in one process group of the trainer and the workers per server.

With one group per server, a server that dies during an update breaks only its own update, and a returning server does
not require a new global group.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from agentrl.engine import InferenceServer, TensorLayout, UpdateGroup
from agentrl.errors import EngineError
from agentrl.errors.foreign import DaemonThreads, run_in_own_thread
from agentrl.weights.contract import PreparedWeights, Transport
from agentrl.weights.tensors import CPU, Bucket, PreparedBuckets, pack

T = TypeVar("T")
_THREADS = DaemonThreads("agentrl-collective")
c10d: Any = torch.distributed
"""Untyped alias: torch's stubs lack the classes of process groups."""
BROADCAST_S = 60.0
"""Timeout in seconds of joining a group and of broadcasting a bucket, after which the server counts as lost."""
_log = logging.getLogger(__name__)


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread, which does not keep the process alive if a dead peer blocks it."""
    return await asyncio.wrap_future(_THREADS.submit(work))


class TrainerGroup:
    """Process group of the trainer, as rank 0, and a server's workers.

    The trainer listens on an address that the server at `url` can reach; joining, or a broadcast, fails after
    `timeout_s`.
    """

    def __init__(self, url: str, *, workers: int, device: torch.device, timeout_s: float) -> None:
        address = address_towards(url)
        self._device = device
        self._store = _listening_store(address, timedelta(seconds=timeout_s))
        self._backend: Any = None
        self._closed = False
        self.info = UpdateGroup(
            name=f"agentrl-{uuid4().hex[:12]}",
            address=address,
            port=self._store.port,
            size=workers + 1,
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout_s=timeout_s,
        )

    async def join(self) -> None:
        """Join the group with the server's workers; raises `EngineError` if they do not join in time."""
        try:
            await in_thread(self._join)
        except RuntimeError as error:
            raise EngineError("the workers of a server did not join the group", got=str(error)[:200]) from error

    def _join(self) -> None:
        self._backend = make_group(self.info, self._store, rank=0)
        if self._closed:  # joining was cancelled
            self.close()

    async def broadcast(self, run: Tensor) -> None:
        """Send bytes to all workers; they may be changed afterwards. Raises `EngineError` if a worker is gone."""
        try:
            await in_thread(lambda: self._send(run))
        except RuntimeError as error:
            raise EngineError("a broadcast of weights broke off", got=str(error)[:200]) from error

    def _send(self, run: Tensor) -> None:
        sent = run.to(self._device)
        self._backend.broadcast(sent, 0).wait()
        if sent.is_cuda:
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Close the group; a broadcast that hangs ends at its own deadline."""
        self._closed = True
        backend, self._backend = self._backend, None
        if backend is not None:
            with suppress(RuntimeError):
                backend.abort()


def make_group(info: UpdateGroup, store: Any, *, rank: int) -> Any:
    """Create the process group when all members have joined through `store`; gloo uses the trainer's address.

    Raises:
        RuntimeError: the members did not join in time.
    """
    timeout = timedelta(seconds=info.timeout_s)
    named = c10d.PrefixStore(f"{info.name}/", c10d.PrefixStore(info.name, store))
    if info.backend == "nccl":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return c10d.ProcessGroupNCCL(c10d.PrefixStore("cuda/", named), rank, info.size, options)
    gloo = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=info.address)]
    return gloo(c10d.PrefixStore("cpu/", named), rank, info.size, options)


def address_towards(url: str) -> str:
    """Find this machine's address on the route to a server; no data is sent."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return str(probe.getsockname()[0])


def _listening_store(address: str, timeout: timedelta) -> Any:
    """Create a store that listens on one address only; any process that can connect may write to it."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return c10d.TCPStore(
        address, port, None, True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class CollectiveTransport(Transport):
    """Transport by broadcasts of buckets, which are copied to the CPU first.

    It uses NCCL if the trainer's tensors are on a GPU, and gloo otherwise.

    A broadcast has at most `bucket_bytes`; joining a group, or a broadcast, fails after `timeout_s`.
    """

    def __init__(self, *, bucket_bytes: int, timeout_s: float = BROADCAST_S) -> None:
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._groups: WeakKeyDictionary[InferenceServer, TrainerGroup] = WeakKeyDictionary()

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> PreparedWeights:
        """Copy the tensors in a thread."""
        began = time.perf_counter()
        device = next(iter(weights.values())).device
        buckets = await run_in_own_thread(pack, weights, bucket_bytes=self._bucket_bytes)
        give = partial(self.send, device)
        return PreparedBuckets(buckets, give, version=version, seconds=time.perf_counter() - began)

    async def send(
        self, device: torch.device, server: InferenceServer, buckets: Sequence[Bucket], version: int
    ) -> None:
        """Broadcast buckets to one server, through its group or a new one; a group is dropped if it fails."""
        group = self._groups.get(server) or await self._make_group(server, device)

        async def broadcast(number: int) -> None:
            await group.broadcast(buckets[number].run)

        try:
            await server.receive_weights([bucket.layout for bucket in buckets], group.info, broadcast, version)
        except BaseException:
            if self._groups.get(server) is group:
                del self._groups[server]
            group.close()
            raise

    async def _make_group(self, server: InferenceServer, device: torch.device) -> TrainerGroup:
        group = TrainerGroup(server.url, workers=await server.workers(), device=device, timeout_s=self._timeout_s)
        try:
            await asyncio.gather(server.join_group(group.info), group.join())
        except BaseException:
            group.close()
            raise
        self._groups[server] = group
        return group

    async def close(self) -> None:
        """Leave all working groups together with the servers.

        Broken groups are not closed, because their servers may hang in them.
        """
        groups = dict(self._groups)
        self._groups.clear()
        leaving = (server.leave_group(group.info) for server, group in groups.items())
        for outcome in await asyncio.gather(*leaving, return_exceptions=True):
            if outcome is not None:
                _log.info("a server did not leave its update group: %s", outcome)
        for group in groups.values():
            group.close()


class GroupMember:
    """Rank 1 of a trainer's group; with NCCL, on this process's current GPU."""

    def __init__(self) -> None:
        self._group: Any = None
        self._device = CPU

    async def join(self, group: UpdateGroup) -> None:
        """Join the trainer's group; raises `EngineError` if that fails."""
        try:
            self._group = await in_thread(partial(_join_as_worker, group))
        except RuntimeError as error:
            raise EngineError("the trainer's group was not joined", got=str(error)) from error
        self._device = torch.device("cuda", torch.cuda.current_device()) if group.backend == "nccl" else CPU

    def leave(self) -> None:
        """Close the connections to the trainer."""
        self._group = None

    async def receive_bucket(self, layout: TensorLayout) -> Bucket:
        """Receive the tensors of the next broadcast; raises `EngineError` if it breaks off."""
        dtype: torch.dtype = getattr(torch, layout.dtype)
        count = sum(torch.Size(shape).numel() for shape in layout.shapes)
        run = torch.empty(count * dtype.itemsize, dtype=torch.uint8, device=self._device)
        await in_thread(partial(self._receive, run))
        return Bucket(run=run, layout=layout)

    def _receive(self, run: torch.Tensor) -> None:
        try:
            self._group.broadcast(run, 0).wait()
        except RuntimeError as error:
            raise EngineError("the broadcast broke off", got=str(error)) from error


def _join_as_worker(group: UpdateGroup) -> Any:
    store = c10d.TCPStore(group.address, group.port, group.size, False, timedelta(seconds=group.timeout_s))
    return make_group(group, store, rank=1)
