"""Consoles of the command line: standard output for results, standard error for everything else."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from html import escape
from pathlib import Path
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from agentrl.errors import AgentRLError, UsageError

_TERMINAL = (*range(0x20), *range(0x7F, 0xA0))
_DIRECTION = (0x61C, *range(0x200E, 0x2010), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*_TERMINAL, *_DIRECTION) if chr(code) not in "\n\t"}
_VISIBLE |= {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE[0x7F] = "\N{SYMBOL FOR DELETE}"


def visible(text: str) -> str:
    r"""Replace control characters by symbols; output of models and tools, and file names, may contain them.

    >>> visible("a\x1b[2J\tb\n")
    'a␛[2J\tb\n'
    """
    return text.translate(_VISIBLE)


def html_table(rows: Mapping[str, str]) -> str:
    """Return an HTML table with two columns, for notebooks.

    >>> html_table({"steps": "3 < 4"})
    '<table><tr><th>steps</th><td>3 &lt; 4</td></tr></table>'
    """
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(visible(value))}</td></tr>" for name, value in rows.items())
    return f"<table>{''.join(cells)}</table>"


class VisibleConsole(Console):
    """A console that sends only its own control codes to the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render to segments of text, with control characters in the texts made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        """End the program if the reader of its output is gone (``agentrl … | head``), without a traceback."""
        self._discard()
        super().on_broken_pipe()

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            self._discard()
            hint = "free some disk space, or write it elsewhere"
            raise UsageError("the output cannot be written", got=error.strerror, hint=hint) from error

    def _discard(self) -> None:
        """Discard what is written from now on, and what is flushed when the copy of `kept_streams` is closed."""
        del self._buffer[:]
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.file.fileno())
        os.close(null)

    def close_file(self, file: TextIO) -> None:
        """Close the file of `kept_streams`."""
        file.close()


class MessageConsole(VisibleConsole):
    """A console that loses messages without an error if the pipe is broken, the terminal closed or the disk full."""

    def close_file(self, file: TextIO) -> None:
        """Close the file of `kept_streams`, even if its last messages are lost."""
        with suppress(OSError):
            file.close()

    def _check_buffer(self) -> None:
        try:
            Console._check_buffer(self)
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Drop the messages instead of ending the program, which may train."""
        del self._buffer[:]


class VisibleFormatter(logging.Formatter):
    """Formatter of log records that makes control characters visible."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return visible(super().format(record))


out = VisibleConsole(markup=False, emoji=False, highlight=False, soft_wrap=True)
err = MessageConsole(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextmanager
def kept_streams() -> Iterator[None]:
    """Print to the present standard output and error, even if the user's code closes or replaces `sys.stdout`."""
    with ExitStack() as stack:
        for console, stream in ((out, sys.stdout), (err, sys.stderr)):
            stack.callback(setattr, console, "file", None)  # then it follows `sys` again
            with suppress(AttributeError, OSError, ValueError):  # a stream without a file descriptor
                copy = os.fdopen(os.dup(stream.fileno()), "w", 1, stream.encoding, stream.errors)
                console.file = copy
                stack.callback(console.close_file, copy)
        yield


def print_error(error: AgentRLError) -> None:
    """Print an error to standard error."""
    err.print(Text.assemble(("error: ", "bold red"), str(error)))


def note(message: str) -> None:
    """Print a message to standard error, so that standard output contains only results."""
    err.print(Text(message, style="dim" if err.is_terminal else ""))


_shown_from: list[Path] = []
"""Folders of the user, if the program has changed the working folder; the last one counts."""


@contextmanager
def paths_shown_from(folder: Path) -> Iterator[None]:
    """Let `shown_path` return paths as a user in `folder` would write them."""
    _shown_from.append(folder)
    try:
        yield
    finally:
        _shown_from.pop()


def shown_path(path: Path) -> Path:
    """Return a path relative to the working folder if it is inside, otherwise unchanged."""
    with suppress(OSError, ValueError):  # a working folder that was removed, or another one
        return path.relative_to(_shown_from[-1] if _shown_from else Path.cwd())
    return path
