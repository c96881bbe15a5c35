"""The exit codes of the program, and its end after Ctrl-C or after foreign code that left threads running."""

from __future__ import annotations

import enum
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

import typer

from agentrl.errors import AgentRLError, UsageError
from agentrl.observe.console import note, print_error


class ExitCode(enum.IntEnum):
    """Exit code of the program."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130


@contextmanager
def message_when_interrupted(words: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C inside the block into an exit code and a line: what is left of the work, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        note(words())
        raise typer.Exit(ExitCode.INTERRUPTED) from None


@contextmanager
def left_for_sure() -> Iterator[None]:
    """End the process after the block when the block started threads for which Python would wait, and they run on.

    Raises:
        typer.Exit: the block was interrupted.
    """
    before = set(threading.enumerate())
    code = ExitCode.DONE
    try:
        yield
    except KeyboardInterrupt:
        note("interrupted")
        code = ExitCode.INTERRUPTED
        if not _waits_for_others_than(before):
            raise typer.Exit(code) from None
    except AgentRLError as error:
        if not _waits_for_others_than(before):
            raise
        print_error(error)
        code = ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAILED
    if _waits_for_others_than(before):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _waits_for_others_than(known: set[threading.Thread]) -> bool:
    return any(not thread.daemon for thread in set(threading.enumerate()) - known)


@contextmanager
def standard_output_closed() -> Iterator[None]:
    """Let nothing that is written to standard output inside the block come out, by whatever way it is written."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
