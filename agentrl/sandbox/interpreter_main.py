"""Program inside a sandbox for `agentrl.sandbox.interpreter`: runs pieces of code in one namespace.

It uses the standard library only. Requests arrive on the original standard input, one line of JSON each
(``{"id": 1, "code": "…"}``); replies go to the original standard output
(``{"id": 1, "output": "…", "raised": false}``). The first reply has id 0 and means that the program is ready. The code
can access neither stream: its input is empty, and its output and that of its children go to a file that is read after
each piece.
"""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import os
import signal
import sys
import tempfile
import traceback
import types
from typing import Any, BinaryIO, TextIO

HEAD = 40_000
TAIL = 20_000
"""Bytes kept from the beginning and from the end of the output."""


class Namespace:
    """Namespace that all pieces of code share."""

    def __init__(self, capture: BinaryIO) -> None:
        self._module = types.ModuleType("__main__")
        sys.modules["__main__"] = self._module
        self._capture = capture
        self._cells = 0
        self.is_running = False

    def run(self, code: str) -> tuple[str, bool]:
        """Run a piece of code, and return its output and True if it raised an exception."""
        self._cells += 1
        name = f"<cell {self._cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        raised = False
        self.is_running = True
        try:
            self._execute(code, name)
        except SystemExit as end:
            _open_input()  # exit() has closed it
            if isinstance(end.code, str):
                sys.stderr.write(f"{end.code}\n")
            sys.stderr.write("[exit() was called; the interpreter keeps running]\n")
        except BaseException as error:
            raised = True
            sys.stderr.write(_format_traceback(error))
        finally:
            self.is_running = False
        return self._take_output(), raised

    def _execute(self, code: str, name: str) -> None:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        names = self._module.__dict__
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
            if value is not None:
                names["_"] = value
                print(repr(value))

    def _take_output(self) -> str:
        """Return and clear the output since the last call."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        size = os.fstat(self._capture.fileno()).st_size
        self._capture.seek(0)
        written = self._capture.read(HEAD)
        if size > HEAD + TAIL:
            self._capture.seek(size - TAIL)
            written += f"\n[… {size - HEAD - TAIL} bytes omitted …]\n".encode()
        written += self._capture.read(TAIL)
        os.ftruncate(self._capture.fileno(), 0)
        return written.decode(errors="replace")


def _format_traceback(error: BaseException) -> str:
    """Format a traceback with only the frames of the user's code."""
    formatted = traceback.TracebackException.from_exception(error)
    current: traceback.TracebackException | None = formatted
    while current is not None:
        own = [frame for frame in current.stack if frame.filename.startswith("<cell ")]
        current.stack = traceback.StackSummary.from_list(own)
        current = current.__cause__ or current.__context__
    return "".join(formatted.format())


def _open_input() -> None:
    """Replace standard input with an empty one."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)


def main() -> None:
    """Serve requests until the input ends."""
    requests: TextIO = os.fdopen(os.dup(0), encoding="utf-8")
    replies: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    capture = tempfile.TemporaryFile(buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # both streams append to one file, which keeps their order and overwrites nothing
    writer = os.open(f"/proc/self/fd/{capture.fileno()}", os.O_WRONLY | os.O_APPEND)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    _open_input()
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    interpreter = Namespace(capture)

    def interrupt(_number: int, _frame: Any) -> None:
        if interpreter.is_running:
            raise KeyboardInterrupt

    def reply(number: int, output: str, raised: bool) -> None:
        replies.write(json.dumps({"id": number, "output": output, "raised": raised}) + "\n")
        replies.flush()

    signal.signal(signal.SIGINT, interrupt)
    reply(0, "", False)
    for line in requests:
        request = json.loads(line)
        reply(request["id"], *interpreter.run(request["code"]))


if __name__ == "__main__":
    main()
