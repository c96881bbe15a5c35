"""The server that is measured."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from agentrl.builders.servers import ServedModel, make_launcher
from agentrl.config.engines import ServerEngineConfig
from agentrl.observe.console import note

_VERSION_ROUTES = {"vllm": "/version", "sglang": "/server_info"}


@asynccontextmanager
async def open_server(section: ServerEngineConfig, served: ServedModel, folder: Path) -> AsyncIterator[str]:
    """Yield the address of a server: the first one of the section, or a launched one that ends with the block."""
    if section.servers != "launch":
        yield section.servers[0]
        return
    async with make_launcher(section, served.path, folder, dtype=served.dtype, say=note) as launcher:
        (process,) = await launcher.start()
        yield process.url


async def server_version(url: str, engine: str) -> str:
    """Return the engine's name with the version that the server reports."""
    async with aiohttp.ClientSession() as http, http.get(url + _VERSION_ROUTES[engine]) as answer:
        return f"{engine} {(await answer.json())['version']}"
