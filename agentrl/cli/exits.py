"""The exit codes of the program, and its end after Ctrl-C or after foreign code that left threads running."""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import FrameType

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
    """Turn Ctrl-C or SIGTERM inside the block into an exit code and a line: what is left, and how to go on."""
    try:
        with _terminated_as_interrupted():
            yield
    except KeyboardInterrupt:
        note(words())
        raise typer.Exit(ExitCode.INTERRUPTED) from None


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, also where the shell that started the program has it ignore Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt, terminate = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        for number, handler in ((signal.SIGTERM, terminate), (signal.SIGINT, interrupt)):
            if handler is not None:  # None: one that is not Python's
                signal.signal(number, handler)


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
