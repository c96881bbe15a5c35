"""Where the command line writes: results to standard output, everything else to standard error."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from agentrl.errors import AgentRLError

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def print_error(error: AgentRLError) -> None:
    """One message, on standard error."""
    err.print(Text.assemble(("error: ", "bold red"), str(error)))


def note(message: str) -> None:
    """Say what is going on, on standard error, so that standard output stays a result."""
    err.print(Text(message, style="dim" if err.is_terminal else ""))
