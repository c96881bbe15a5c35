"""Servers that sleep while the trainer trains, and give it the memory of the GPU that they share."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch

from agentrl.server import InferenceServer
from agentrl.weights.server_group import ServerGroup

TIMEOUT_S = 120.0

cuda: Any = torch.cuda
"""Not all of it is typed."""


class ServerSleep:
    """Puts the servers of a group to sleep, and wakes them. The caller holds the group's `changing`.

    Args:
        group: The servers.

    Attributes:
        is_asleep: The servers sleep.
        released_bytes: Given back in the last sleep, as this process sees it on its GPU; 0 without one.
    """

    def __init__(self, group: ServerGroup) -> None:
        self._group = group
        self._asleep: WeakSet[InferenceServer] = WeakSet()
        self.is_asleep = False
        self.released_bytes = 0

    async def sleep(self) -> None:
        """Hold all servers, and let them sleep; one that cannot is taken out."""
        await self._group.pause()
        before = free_bytes()
        self.is_asleep = True
        await self._group.change(self._put_to_sleep, what="falling asleep", deadline_s=TIMEOUT_S)
        self.released_bytes = max(0, free_bytes() - before)

    async def _put_to_sleep(self, server: InferenceServer) -> None:
        self._asleep.add(server)
        await server.sleep()

    async def wake_up(self) -> None:
        """Wake those that sleep, which stay held; one that cannot is taken out. One that came back is awake."""
        if not self.is_asleep:
            return
        cuda.empty_cache()  # the servers need what torch only keeps for later
        await self._group.change(self.wake, what="waking up", deadline_s=TIMEOUT_S)
        self.is_asleep = False

    async def wake(self, server: InferenceServer) -> None:
        """Wake one server, if it sleeps or may do so: it did not say in time."""
        if server in self._asleep:
            await server.wake_up()
            self._asleep.discard(server)


def free_bytes() -> int:
    """Free memory of this process's GPU; 0 while it uses none, so that it makes no context on those of servers."""
    return int(cuda.mem_get_info()[0]) if cuda.is_initialized() else 0
