"""One link to a server per event loop, shared by all environments that live there."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from agentrl.remote.link import Link


@dataclass(slots=True)
class _Shared:
    link: Link
    users: int = 0


class Links:
    """Lends the running loop's link, and closes it when its last user gives it back.

    Args:
        url: The server's address.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()

    def borrow(self) -> Link:
        """The link of the running loop."""
        shared = self._of_loop.setdefault(asyncio.get_running_loop(), _Shared(Link(self.url)))
        shared.users += 1
        return shared.link

    async def give_back(self) -> None:
        """One `borrow` less."""
        shared = self._of_loop[asyncio.get_running_loop()]
        shared.users -= 1
        if shared.users == 0:
            await shared.link.close()


def ask_now(url: str, route: str, *, patience_s: float) -> Any:
    """Ask for a route outside any event loop, or inside one that may wait: a thread of its own asks.

    Raises:
        AgentRLError: as `Link.ask` does.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="agentrl-environment-server") as thread:
        return thread.submit(asyncio.run, _ask_once(url, route, patience_s)).result()


async def _ask_once(url: str, route: str, patience_s: float) -> Any:
    link = Link(url)
    try:
        return await link.ask("GET", route, patience_s=patience_s)
    finally:
        await link.close()
