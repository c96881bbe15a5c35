"""What weight sync needs of a group of servers; `agentrl.serving.pool.ServerPool.group` is one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from agentrl.server import InferenceServer

Action: TypeAlias = Callable[[InferenceServer], Awaitable[object]]
Deliver: TypeAlias = Callable[[Mapping[str, Any] | None, int], Awaitable[object]]


class ServerGroup(Protocol):
    """Servers that have the same weights."""

    changing: asyncio.Lock
    """Held while weights change, and while a server comes back."""
    version: int
    """Of the weights that every server that takes part samples with."""
    is_paused: bool

    @property
    def servers(self) -> Sequence[InferenceServer]:
        """The servers that take part now."""

    async def pause(self) -> None:
        """Hold all requests; a server that cannot is taken out."""

    async def resume(self) -> None:
        """Go on; a server that cannot is taken out."""

    async def each(self, action: Action, *, what: str, deadline_s: float) -> None:
        """Do something on every server at once; those that fail are taken out. Raises what stops training."""

    async def change(self, action: Action, *, what: str, deadline_s: float) -> None:
        """`each`, for what keeps a server too busy to answer anything else."""

    def publish(self, version: int) -> None:
        """All servers that take part have these weights now."""

    def remove(self, server: InferenceServer, why: object) -> None:
        """Take a server out until it has been given the current weights again."""

    def connect_sync(self, *, deliver: Deliver, bring_up_to_date: Action) -> None:
        """Tell the group how weights reach all servers, and one that comes back."""

    async def wait_for_server(self, *, deadline_s: float) -> None:
        """Wait until a server takes part; raises `EngineError` when none will."""
