"""The program inside a sandbox behind `agentrl.sandbox.interpreter`: runs pieces of code in one namespace.

Needs nothing but the standard library. Requests come by what was standard input, a line of JSON each
(``{"id": 1, "code": "…"}``); replies go to what was standard output
(``{"id": 1, "output": "…", "raised": false}``), the first one unasked and with the number 0, once the program is ready.
The code sees neither: it reads from an empty input, and what it and its children write goes into a file that is read
after each piece.
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
"""Bytes of output that are kept, of its beginning and its end."""


class Namespace:
    """One namespace, kept over all pieces."""

    def __init__(self, capture: BinaryIO) -> None:
        self._module = types.ModuleType("__main__")
        sys.modules["__main__"] = self._module
        self._capture = capture
        self._cells = 0
        self.is_running = False

    def run(self, code: str) -> tuple[str, bool]:
        """Run a piece of code; what it wrote, and whether it raised."""
        self._cells += 1
        name = f"<cell {self._cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        raised = False
        self.is_running = True
        try:
            self._execute(code, name)
        except SystemExit:
            _open_input()  # exit() has closed it
            sys.stderr.write("[exit() was called; the interpreter goes on]\n")
        except BaseException as error:
            raised = True
            sys.stderr.write(_shortened(error))
        finally:
            self.is_running = False
        return self._taken(), raised

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

    def _taken(self) -> str:
        """Take what was written since the last time."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        size = os.fstat(self._capture.fileno()).st_size
        self._capture.seek(0)
        written = self._capture.read(HEAD)
        if size > HEAD + TAIL:
            self._capture.seek(size - TAIL)
            written += f"\n[… {size - HEAD - TAIL} bytes left out …]\n".encode()
        written += self._capture.read(TAIL)
        os.ftruncate(self._capture.fileno(), 0)
        return written.decode(errors="replace")


def _shortened(error: BaseException) -> str:
    """The traceback with the frames of the user's code alone; all of it where there is none."""
    told = traceback.TracebackException.from_exception(error)
    current: traceback.TracebackException | None = told
    while current is not None:
        own = [frame for frame in current.stack if frame.filename.startswith("<cell ")]
        current.stack = traceback.StackSummary.from_list(own)
        current = current.__cause__ or current.__context__
    return "".join(told.format())


def _open_input() -> None:
    """An input that is at its end."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)


def main() -> None:
    """Serve requests until the input ends."""
    requests: TextIO = os.fdopen(os.dup(0), encoding="utf-8")
    replies: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    capture = tempfile.TemporaryFile(buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # both streams append to one file, so that what is written last stands last and nothing is written over
    writer = os.open(f"/proc/self/fd/{capture.fileno()}", os.O_WRONLY | os.O_APPEND)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    _open_input()
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    interpreter = Namespace(capture)

    def interrupted(_number: int, _frame: Any) -> None:
        if interpreter.is_running:
            raise KeyboardInterrupt

    def reply(number: int, output: str, raised: bool) -> None:
        replies.write(json.dumps({"id": number, "output": output, "raised": raised}) + "\n")
        replies.flush()

    signal.signal(signal.SIGINT, interrupted)
    reply(0, "", False)
    for line in requests:
        request = json.loads(line)
        reply(request["id"], *interpreter.run(request["code"]))


if __name__ == "__main__":
    main()
