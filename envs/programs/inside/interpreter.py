"""A Python interpreter that remembers: runs pieces of code one after the other and says what they print."""

from __future__ import annotations

import ast
import io
import json
import os
import sys
import traceback
from typing import Any, BinaryIO

MOST = 20_000
"""Characters of output that are kept."""


class Printed(io.TextIOBase):
    """What was printed, up to a limit."""

    def __init__(self) -> None:
        self.text = ""

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Keep it, if there is room."""
        self.text += text[: MOST - len(self.text)]
        return len(text)


def run(code: str, space: dict[str, Any]) -> str:
    r"""Run some code; what it prints, the value of its last line, and its error.

    >>> space = {}
    >>> run("x = 6", space), run("x * 7", space), run("1 / 0", space).splitlines()[-1]
    ('', '42\n', 'ZeroDivisionError: division by zero')
    """
    printed = Printed()
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = printed
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), space)
            if value is not None:
                print(repr(value))
    except BaseException:  # whatever the code raises is its output, exits included
        lines = traceback.format_exc().splitlines()
        own = [number for number, line in enumerate(lines) if 'File "<code>"' in line]
        printed.write("\n".join([*lines[:1], *lines[own[0] :]] if own else lines[-1:]))
    finally:
        sys.stdout, sys.stderr = before
    return printed.text


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Run what is asked until there are no more requests."""
    space: dict[str, Any] = {"__name__": "__main__"}
    answers.write(b'{"ready": true}\n')
    answers.flush()
    for line in requests:
        answers.write(json.dumps({"printed": run(json.loads(line)["code"], space)}).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.chdir("..")
    serve(requests, answers)
