"""Ctrl-C in a command that has no checkpoint to save: say what is kept, and leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from agentrl.cli.exit_code import ExitCode
from agentrl.observe.console import note


@contextmanager
def told_when_interrupted(words: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C inside the block into a line and an exit code.

    Args:
        words: What is left of the work, and how to go on.

    Raises:
        typer.Exit: the block was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        note(words())
        raise typer.Exit(ExitCode.INTERRUPTED) from None
