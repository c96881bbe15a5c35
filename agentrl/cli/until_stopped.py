"""A server that a command runs until Ctrl-C."""

from __future__ import annotations

import asyncio
from typing import Protocol

from agentrl.assembly.signals import stop_signals
from agentrl.env_server import ServerSettings
from agentrl.observe.console import note, out

LOCAL = ("127.0.0.1", "::1", "localhost")


class Server(Protocol):
    """What is served."""

    url: str
    """Known once it was started."""

    async def start(self) -> None:
        """Listen."""

    async def close(self) -> None:
        """Listen no more, and release everything; also when it was not started."""


def serve_until_stopped(server: Server, settings: ServerSettings, *, open_to_all: str, usage: str) -> None:
    """Serve until the first Ctrl-C or SIGTERM; the address goes to standard output.

    Args:
        server: Not started yet.
        settings: Of the server.
        open_to_all: What strangers can do on other addresses than this machine's own, where no token keeps them out.
        usage: What is served and how it is used; ``{url}`` stands for the address.
    """
    if settings.token is None and settings.host not in LOCAL:
        note(f"without --token-file, everybody who reaches {settings.host} can {open_to_all}")
    asyncio.run(_serve(server, usage))


async def _serve(server: Server, usage: str) -> None:
    stop = asyncio.Event()
    with stop_signals(stop.set):
        try:
            await server.start()
            out.print(server.url)
            note(f"{usage.format(url=server.url)}; Ctrl-C ends it")
            await stop.wait()
            note("closing the sessions")
        finally:
            await server.close()
