"""Servers that a command runs until Ctrl-C, and the options of those that other machines reach."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Protocol

import typer

from agentrl.builders.run import stop_signals
from agentrl.errors import UsageError
from agentrl.observe.console import note, out
from agentrl.remote.server import ServerSettings

Host = Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is all of them.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes any.")]
Lease = Annotated[float, typer.Option("--lease", min=1, help="Seconds after which an unused session is closed.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        help="File with the token that clients must send; else the token is the environment variable's value.",
        show_default=False,
    ),
]
LONGEST_TOKEN = 4096


def read_token(file: Path | None, variable: str) -> str | None:
    """Read the token that clients must send; a command line is no place for it, as other users of the machine see it.

    Args:
        file: Holds it; ``None`` takes the environment variable.
        variable: Name of the environment variable that clients read, too.

    Raises:
        UsageError: the file cannot be read, or what it or the variable holds is no token.
    """
    if file is None:
        given, source = os.environ.get(variable, ""), f"the environment variable {variable}"
        if not given:
            return None
    else:
        source = f"the token file {file}"
        try:
            given = file.read_bytes()[: LONGEST_TOKEN + 1].decode("utf-8", "replace")
        except OSError as error:
            raise UsageError(f"cannot read {source}", got=error.strerror, expected="a readable file") from error
    token = given.strip()
    if not token or len(token) > LONGEST_TOKEN or not (token.isascii() and token.isprintable()) or " " in token:
        raise UsageError(
            f"{source} holds no token",
            got="nothing" if not token else f"{len(token)} characters, not all of which a token may have",
            expected="1 to 4096 printable ASCII characters without spaces",
            hint="make one: python3 -c 'import secrets; print(secrets.token_hex(32))'",
        )
    return token


LOCAL = ("127.0.0.1", "::1", "localhost")


class Server(Protocol):
    """A server of environments or sandboxes."""

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
