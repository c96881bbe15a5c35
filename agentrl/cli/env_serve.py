"""`agentrl env serve`: one environment for clients elsewhere, until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from agentrl.assembly.signals import stop_signals
from agentrl.cli.console import note, out
from agentrl.env import EnvironmentSpec
from agentrl.env_server import EnvironmentServer, ServerSettings

LOCAL = ("127.0.0.1", "::1", "localhost")


def serve_environment(spec: EnvironmentSpec, options: Mapping[str, Any], settings: ServerSettings) -> None:
    """Serve until the first Ctrl-C or SIGTERM; the address goes to standard output.

    Raises:
        UsageError: the options are wrong, or the port is taken.
        EnvironmentFailure: the environment cannot be made.
    """
    if settings.token is None and settings.host not in LOCAL:
        note(f"without --token, everybody who reaches {settings.host} can use this server")
    asyncio.run(_serve(spec, options, settings))


async def _serve(spec: EnvironmentSpec, options: Mapping[str, Any], settings: ServerSettings) -> None:
    stop = asyncio.Event()
    with stop_signals(stop.set):
        server = EnvironmentServer(spec, options, settings)
        try:
            await server.start()
            out.print(server.url)
            note(f"{spec.name} is served: agentrl env play {server.url}; Ctrl-C ends it")
            await stop.wait()
            note("closing the sessions")
        finally:
            await server.close()
