"""Exit codes of the program, and its exit after Ctrl-C or after user code that leaves threads running."""

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
from agentrl.errors.foreign import count_abandoned
from agentrl.observe.console import note, print_error
from agentrl.runs.stop import StopRequest, end_process, end_process_later

EXIT_S = 10.0
"""Seconds for Python to end after a command, before the process ends itself."""
INTERRUPTED_EXIT_S = 1.0
"""The same after an interruption."""


class ExitCode(enum.IntEnum):
    """Exit code of the program."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130


@contextmanager
def message_when_interrupted(words: Callable[[], str]) -> Iterator[None]:
    """Handle Ctrl-C or SIGTERM inside the block: print a message, and exit with `ExitCode.INTERRUPTED`.

    Args:
        words: Returns the message.
    """
    try:
        with _sigterm_as_interrupt():
            yield
    except KeyboardInterrupt:
        note(words())
        raise typer.Exit(ExitCode.INTERRUPTED) from None


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, even if the shell started the program with Ctrl-C ignored."""
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
            if handler is not None:  # None: a handler that was not installed from Python
                signal.signal(number, handler)


@contextmanager
def exit_despite_threads() -> Iterator[None]:
    """End the process after the block if the block left non-daemon threads running, for which Python would wait.

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
        if not _has_new_threads(before):
            raise typer.Exit(code) from None
    except AgentRLError as error:
        if not _has_new_threads(before):
            raise
        print_error(error)
        code = ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.FAILED
    if _has_new_threads(before):
        end_process(code)


@contextmanager
def end_despite_foreign_code() -> Iterator[None]:
    """End the process with the exit code of the block, at most `EXIT_S` after it.

    Python itself would wait for ever for threads and child processes that foreign code left behind.
    """
    StopRequest.exit_code = ExitCode.INTERRUPTED
    try:
        yield
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else ExitCode.FAILED if end.code else ExitCode.DONE
        _leave_soon(code)
        raise
    except BaseException:  # with --debug; Python prints it
        _leave_soon(ExitCode.FAILED, now=False)
        raise
    _leave_soon(ExitCode.DONE)


def _leave_soon(code: int, *, now: bool = True) -> None:
    """End the process now if foreign code still runs, or else after a while."""
    if now and count_abandoned():
        end_process(code)
    end_process_later(code, INTERRUPTED_EXIT_S if code == ExitCode.INTERRUPTED else EXIT_S)


def _has_new_threads(known: set[threading.Thread]) -> bool:
    return any(not thread.daemon for thread in set(threading.enumerate()) - known)


@contextmanager
def discard_standard_output() -> Iterator[None]:
    """Discard everything that the block writes to standard output, even below Python."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
