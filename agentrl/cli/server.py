"""Servers that a command runs until Ctrl-C, and their options."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from agentrl.errors import UsageError
from agentrl.observe.console import note, out
from agentrl.remote.server import ServerSettings
from agentrl.runs.stop import end_process, run_with_stop_event

Host = Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all addresses.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 for a free port.")]
Lease = Annotated[float, typer.Option("--lease", min=1, help="Seconds after which an unused session is closed.")]
MAX_TOKEN_LENGTH = 4096
LOCAL = ("127.0.0.1", "::1", "localhost")


def token_option(variable: str) -> Any:
    """Return the option for the file with the token; see `read_token`."""
    told = f"File with the token that clients must send; default: the value of the environment variable {variable}."
    return typer.Option("--token-file", help=told, show_default=False)


def read_token(file: Path | None, variable: str) -> str | None:
    """Read the token that clients must send. It is not an option, because other users can read command lines.

    Args:
        file: File with the token; ``None`` reads the environment variable.
        variable: Name of the environment variable, which clients also read.

    Raises:
        UsageError: the file cannot be read, or the token is not valid.
    """
    if file is None:
        content, source = os.environ.get(variable, ""), f"the environment variable {variable}"
        if not content:
            return None
    else:
        source = f"the token file {file}"
        try:
            content = file.read_bytes()[: MAX_TOKEN_LENGTH + 1].decode("utf-8", "replace")
        except OSError as error:
            raise UsageError(f"cannot read {source}", got=error.strerror, expected="a readable file") from error
    token = content.strip()
    if not token or len(token) > MAX_TOKEN_LENGTH or not (token.isascii() and token.isprintable()) or " " in token:
        raise UsageError(
            f"{source} does not hold a valid token",
            got="nothing" if not token else f"{len(token)} characters, which are too many or not allowed",
            expected="1 to 4096 printable ASCII characters without spaces",
            hint="create one: python3 -c 'import secrets; print(secrets.token_hex(32))'",
        )
    return token


class Server(Protocol):
    """A server that a command runs."""

    url: str
    """Address of the server; set by `start`."""

    async def start(self) -> None:
        """Start to listen."""

    async def close(self) -> None:
        """Stop listening and release all resources; also allowed before `start`."""


def serve_until_stopped(server: Server, settings: ServerSettings, *, open_to_all: str, usage: str) -> None:
    """Serve until the first Ctrl-C or SIGTERM; print the address to standard output.

    `open_to_all` describes, for a warning, what anyone can do on a non-local host without a token. `usage` describes
    the service and how to use it; ``{url}`` is replaced by the address.
    """
    if settings.token is None and settings.host not in LOCAL:
        note(f"without --token-file, anyone who can reach {settings.host} can {open_to_all}")
    run_with_stop_event(lambda stop: _serve(server, usage, stop))


async def _serve(server: Server, usage: str, stop: asyncio.Event) -> None:
    try:
        await server.start()
        out.print(server.url)
        note(f"{usage.format(url=server.url)}; stop with Ctrl-C")
        await stop.wait()
        note("closing the sessions")
    finally:
        await server.close()


def serve_on_stdio(run: Callable[[], Awaitable[None]], close: Callable[[], Awaitable[None]]) -> None:
    """Serve one client over standard input and output, until the input ends or the first Ctrl-C or SIGTERM."""
    run_with_stop_event(lambda stop: _serve_on_stdio(run, close, stop))


async def _serve_on_stdio(
    run: Callable[[], Awaitable[None]], close: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> None:
    running, stopping = asyncio.ensure_future(run()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
    finally:
        stopping.cancel()
        await close()
        if not running.done():  # a thread waits for the next line of the input and cannot be interrupted
            end_process(0)
