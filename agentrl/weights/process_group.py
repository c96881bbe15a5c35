"""The trainer's side of a process group with the workers of one server.

Torch's own groups belong to a world in which everybody has a rank; trainer and server live in worlds of their own. So
the group is made from its parts: a store in which the members meet, and the backend. Names in the store are those that
torch's groups use, because SGLang makes its side with torch's functions.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor

from agentrl.errors import EngineError
from agentrl.server import UpdateGroup
from agentrl.weights.daemon_thread import in_thread

c10d: Any = torch.distributed
"""Its type stubs lack what groups are made of."""


class TrainerGroup:
    """A group in which the trainer is rank 0.

    Args:
        url: The server's address: the trainer listens where it can be reached from there.
        workers: Of the server.
        device: Of the trainer's tensors.
        timeout_s: Deadline of the meeting, and of each broadcast.

    Attributes:
        info: What the server has to know to join.
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

    async def meet(self) -> None:
        """Wait for the server's workers, who have been told to join.

        Raises:
            EngineError: they did not come.
        """
        try:
            await in_thread(self._meet)
        except RuntimeError as error:
            raise EngineError("the workers of a server did not join the group", got=str(error)[:200]) from error

    def _meet(self) -> None:
        self._backend = make_group(self.info, self._store, rank=0)
        if self._closed:  # nobody waits any more
            self.close()

    async def broadcast(self, run: Tensor) -> None:
        """Send bytes to all workers; done when they are on their way and may be changed.

        Raises:
            EngineError: a worker is gone, or does not receive.
        """
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
        """Let go; a broadcast that hangs ends by its own deadline."""
        self._closed = True
        backend, self._backend = self._backend, None
        if backend is not None:
            with suppress(RuntimeError):
                backend.abort()


def make_group(info: UpdateGroup, store: Any, *, rank: int) -> Any:
    """The group, once all members have met; with gloo on the address at which the trainer listens.

    Args:
        info: Its members and backend.
        store: In which they meet.
        rank: Of this member.

    Raises:
        RuntimeError: they did not come in time.
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
    """The address of this machine from which a server is reached; nothing is sent."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return str(probe.getsockname()[0])


def _listening_store(address: str, timeout: timedelta) -> Any:
    """A store that listens on one address only; whoever reaches it may write into it."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return c10d.TCPStore(
        address, port, None, True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
