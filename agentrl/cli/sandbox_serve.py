"""`agentrl sandbox serve`: sandboxes for clients elsewhere, until Ctrl-C."""

from __future__ import annotations

import asyncio

from agentrl.assembly.signals import stop_signals
from agentrl.cli.console import note, out
from agentrl.cli.env_serve import LOCAL
from agentrl.env_server import ServerSettings
from agentrl.env_server.sandbox_server import SandboxServer
from agentrl.sandbox import SandboxSpec


def serve_sandboxes(spec: SandboxSpec, settings: ServerSettings) -> None:
    """Serve until the first Ctrl-C or SIGTERM; the address goes to standard output.

    Raises:
        UsageError: this machine can run no such sandbox, or the port is taken.
        SandboxError: no sandbox starts.
    """
    if settings.token is None and settings.host not in LOCAL:
        note(f"without --token, everybody who reaches {settings.host} can run programs here")
    asyncio.run(_serve(spec, settings))


async def _serve(spec: SandboxSpec, settings: ServerSettings) -> None:
    stop = asyncio.Event()
    with stop_signals(stop.set):
        server = SandboxServer(spec, settings)
        try:
            await server.start()
            out.print(server.url)
            note(f"{spec.type} sandboxes are served: type http, url {server.url}; Ctrl-C ends it")
            await stop.wait()
            note("closing the sandboxes")
        finally:
            await server.close()
