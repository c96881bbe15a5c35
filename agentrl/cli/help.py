"""What stands under every help page: examples, and how failures are told."""

from __future__ import annotations

from rich.markup import escape

FOOTER = (
    "Add --debug to any command for full tracebacks. "
    "Exit codes: 0 done, 1 failed, 2 wrong usage or config, 130 interrupted."
)


def examples(*commands: str) -> str:
    """The end of a help page: commands to copy, then the footer."""
    lines = "\n".join(f"  [cyan]{escape(command)}[/cyan]" for command in commands)
    return f"Examples:\n{lines}\n\n{FOOTER}"
