"""Command line interface."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

__all__ = ["main"]

INTERRUPTED = 130
"""Exit code of an interruption; the same as in `agentrl.cli.exits`, which is imported later."""
_end: Callable[[], NoReturn] | None = None
"""Ends a program that does not delete its objects."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with an `agentrl.cli.exits.ExitCode`.

    Ctrl-C while the libraries are imported ends the process with one line and no traceback.

    Args:
        arguments: Arguments after ``agentrl``; default `sys.argv`.
    """
    atexit.register(_end_without_deletion)  # registered first, so that it is called last
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread() and before is signal.default_int_handler
    if is_main:
        signal.signal(signal.SIGINT, _end_at_once)

    def imported() -> None:
        if is_main:
            signal.signal(signal.SIGINT, before)

    try:
        importlib.import_module("agentrl.cli.application").run(arguments, imported=imported)
    finally:
        imported()


def skip_deletion(end: Callable[[], NoReturn]) -> None:
    """Let `end` end the program after Python has called the functions of `atexit`.

    Python would then delete all objects, without any other thread that could end a ``__del__`` that hangs.
    """
    global _end
    _end = end


def _end_without_deletion() -> None:
    if _end is not None:
        logging.shutdown()
        _end()


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """End the process without a traceback: nothing has started yet, and interrupted imports raise arbitrary errors."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
