"""Options of commands that serve something to other machines."""

from __future__ import annotations

from typing import Annotated

import typer

Host = Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is all of them.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes any.")]
Lease = Annotated[float, typer.Option("--lease", min=1, help="Seconds after which an unused session is closed.")]
TOKEN_HELP = "What clients must send; they take it from the same variable."
