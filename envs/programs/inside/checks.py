"""Program that runs tests that are Python code against a solution in another sandbox.

Names that the tests use but do not define belong to the solution: a call sends the arguments out as data, and the
result comes back as data. No code of the solution runs in the process of the tests.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
from collections.abc import Iterable
from typing import Any, BinaryIO

from .values import NotPlainData, decode, encode

TOLD = 400


class Remote:
    """Reference to a function, class or object of the solution."""

    def __init__(self, line: Line, where: dict[str, Any]) -> None:
        self._line = line
        self._where = where

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it with encoded arguments."""
        return self._line.ask(
            {
                **self._where,
                "arguments": encode(arguments, number_of),
                "named": {name: encode(value, number_of) for name, value in named.items()},
            }
        )

    def __getattr__(self, name: str) -> Any:
        """Return one of its attributes."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self._line.ask({**self._where, "attribute": name})


def number_of(value: Any) -> int:
    """Return the number of an object of the solution."""
    if isinstance(value, Remote) and "object" in value._where:
        return int(value._where["object"])
    raise NotPlainData(f"an argument of type {type(value).__name__} is not plain data")


class Line:
    """Connection to the solution, through the process that runs both."""

    def __init__(self, answers: BinaryIO, requests: BinaryIO) -> None:
        self._in, self._out = answers, requests

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self._out.write(json.dumps(message).encode() + b"\n")
        self._out.flush()

    def hear(self) -> Any:
        """Return the next message."""
        line = self._in.readline()
        if not line:
            os._exit(1)
        return json.loads(line)

    def ask(self, request: dict[str, Any]) -> Any:
        """Send a request to the solution and return its value; raise its exception here."""
        self.tell({"ask": request})
        answer = self.hear()
        if "value" in answer:
            return decode(answer["value"], lambda number: Remote(self, {"object": number}))
        kind: Any = getattr(builtins, str(answer.get("raised")), None)
        is_error = isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError
        said = str(answer.get("said", ""))
        raise kind(said) if is_error else RuntimeError(f"{answer.get('raised')}: {said}")


def foreign_names(trees: Iterable[ast.AST]) -> set[str]:
    r"""Return the names that code uses but does not define.

    >>> sorted(foreign_names([ast.parse("import math\nassert math.isclose(area(2), sum([1]))")]))
    ['area']
    """
    used, own = set(), set(dir(builtins))
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                own |= {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
            case ast.ExceptHandler(name=str(name)):
                own.add(name)
    return used - own


def check(line: Line, setup: str, tests: list[str]) -> list[str]:
    """Run each test by itself; return the problem of each, empty for a test that passed."""
    trees = [ast.parse(text) for text in (setup, *tests)]
    space: dict[str, Any] = {"__name__": "tests"}
    space |= {name: Remote(line, {"call": name}) for name in foreign_names(trees)}
    exec(compile(trees[0], "<setup>", "exec"), space)
    problems = []
    for number, tree in enumerate(trees[1:]):
        try:
            exec(compile(tree, f"<test {number}>", "exec"), space)
            problems.append("")
        except BaseException as error:
            problems.append(f"{type(error).__name__}: {str(error)[:TOLD]}")
    return problems


if __name__ == "__main__":
    answers, requests = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    line = Line(answers, requests)
    line.tell({"ready": True})
    task = line.hear()
    try:
        line.tell({"problems": check(line, task["setup"], task["tests"])})
    except Exception as error:
        line.tell({"broken": f"{type(error).__name__}: {error}"})
    os._exit(0)
