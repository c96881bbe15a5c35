"""Server of a proxy that is an ASGI application, in the proxy's own environment."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from typing import Any

import uvicorn


class _Server(uvicorn.Server):
    addresses: Sequence[str] = ()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print("READY " + json.dumps([[address, "none"] for address in self.addresses]), flush=True)


def serve(application: Any, listener: socket.socket, addresses: Sequence[str]) -> None:
    """Serve until the process ends, and print the address of each session once the application has started."""
    server = _Server(uvicorn.Config(application, log_level="warning"))
    server.addresses = addresses
    asyncio.run(server.serve([listener]))
