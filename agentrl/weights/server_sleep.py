"""Servers that sleep while the trainer trains, and give it the memory of the GPUs that they share."""

from __future__ import annotations

import torch

from agentrl.server import InferenceServer
from agentrl.weights.server_group import ServerGroup

TIMEOUT_S = 120.0


class Naps:
    """Puts the servers of a group to sleep, and wakes them. The caller holds the group's `changing`.

    Args:
        group: The servers.

    Attributes:
        is_on: The servers sleep.
        released_bytes: Given back in the last sleep, as this process sees it on its GPUs; 0 without any.
    """

    def __init__(self, group: ServerGroup) -> None:
        self._group = group
        self._asleep: set[InferenceServer] = set()
        self.is_on = False
        self.released_bytes = 0

    async def begin(self) -> None:
        """Hold all servers, and let them sleep; one that cannot is taken out."""
        await self._group.pause()
        before = free_bytes()
        self.is_on = True
        await self._group.each(self._sleep, what="falling asleep", deadline_s=TIMEOUT_S)
        self.released_bytes = max(0, free_bytes() - before)

    async def _sleep(self, server: InferenceServer) -> None:
        self._asleep.add(server)
        await server.sleep()

    async def end(self) -> None:
        """Wake those that sleep, which stay held; one that cannot is taken out. One that came back is awake."""
        await self._group.each(self._wake_up, what="waking up", deadline_s=TIMEOUT_S)
        self._asleep.clear()
        self.is_on = False

    async def _wake_up(self, server: InferenceServer) -> None:
        if server in self._asleep:
            await server.wake_up()


def free_bytes() -> int:
    """Free memory of all GPUs that this process sees."""
    return sum(torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count()))
