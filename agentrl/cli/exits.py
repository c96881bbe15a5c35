"""Exit codes of the program, and its exit after Ctrl-C or when user code has left threads running."""

from __future__ import annotations

import enum
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import TextIO

import typer

from agentrl.cli import skip_deletion
from agentrl.errors.foreign import count_abandoned
from agentrl.observe.console import note
from agentrl.runs.stop import INTERRUPTED_EXIT_S, end_process, end_process_later, forced_exit

EXIT_S = 10.0
"""Seconds for Python to end after a command, before the process is forced to exit."""
THREADS_EXIT_S = 1.0
"""The same if user code left threads running that are not daemons, because Python waits for such threads."""


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
def end_despite_foreign_code() -> Iterator[None]:
    """End the process with the exit code of the block, at most `EXIT_S` after it.

    Python itself would wait for ever for threads and child processes that foreign code left behind, and for a
    ``__del__`` that hangs.
    """
    known = set(threading.enumerate())
    with forced_exit(ExitCode.INTERRUPTED):
        try:
            yield
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else ExitCode.FAILED if end.code else ExitCode.DONE
            _leave_soon(code, known)
            raise
        except BaseException:  # Python prints it, as --debug is set
            end_process_later(ExitCode.FAILED, EXIT_S)
            raise
    _leave_soon(ExitCode.DONE, known)


def _leave_soon(code: int, known: set[threading.Thread]) -> None:
    """End the process now if an abandoned call still runs, or else after a while."""
    if count_abandoned():
        end_process(code)
    skip_deletion(functools.partial(end_process, code))
    has_threads = any(not thread.daemon for thread in set(threading.enumerate()) - known)
    seconds = INTERRUPTED_EXIT_S if code == ExitCode.INTERRUPTED else THREADS_EXIT_S if has_threads else EXIT_S
    end_process_later(code, seconds)


@contextmanager
def discard_standard_output() -> Iterator[None]:
    """Discard everything that the block writes to standard output, even below Python."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, _descriptor_1_to(nowhere), redirect_stdout(nowhere):
        yield


@contextmanager
def print_to_standard_error() -> Iterator[None]:
    """Write to standard error what the block prints to standard output, even below Python, except agentrl's results."""
    with _descriptor_1_to(2), redirect_stdout(sys.stderr):
        yield


@contextmanager
def _descriptor_1_to(target: int | TextIO) -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(target if isinstance(target, int) else target.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
