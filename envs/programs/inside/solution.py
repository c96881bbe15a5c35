"""Program that serves calls to a solution, one line of JSON each; the code of the solution shares its process.

The process contains no secrets: arguments come in, values go out, and the right values are never sent here.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import types
from typing import Any, BinaryIO

from .values import NotPlainData, decode, encode

MAX_LINE_BYTES = 256 * 1024
"""Maximum bytes of an answer."""
TOLD = 400
"""Maximum characters of an error message in an answer."""


class Server:
    """Server of requests about one solution."""

    def __init__(self) -> None:
        self.module = types.ModuleType("solution")
        self.kept: list[Any] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request; return its value or its exception."""
        try:
            return {"value": encode(self.carry_out(request), self.keep)}
        except BaseException as error:  # anything that the solution raises, including exits
            return {"raised": type(error).__name__, "said": _message(error)}

    def carry_out(self, request: dict[str, Any]) -> Any:
        """Load the solution, call something in it, or read an attribute."""
        if "source" in request:
            os.chdir(request["folder"])
            sys.path[:0] = request["path"]
            sys.modules["solution"] = self.module
            exec(compile(request["source"], "<solution>", "exec"), self.module.__dict__)
            return None
        target = self.find(request)
        if request.get("attribute") is not None:
            return getattr(target, request["attribute"])
        return target(*decode(request["arguments"], self.kept.__getitem__), **self.keyword_arguments(request))

    def keyword_arguments(self, request: dict[str, Any]) -> dict[str, Any]:
        """Decode the keyword arguments of a request."""
        return {name: decode(value, self.kept.__getitem__) for name, value in request.get("named", {}).items()}

    def find(self, request: dict[str, Any]) -> Any:
        """Return the function, class or object that a request is about."""
        if "object" in request:
            return self.kept[request["object"]]
        owner = importlib.import_module(request["module"]) if request.get("module") else self.module
        try:
            return functools.reduce(getattr, request["call"].split("."), owner)
        except AttributeError:
            raise NameError(f"name {request['call']!r} is not defined") from None

    def keep(self, value: Any) -> int:
        """Keep an object that is not plain data; return its number."""
        self.kept.append(value)
        return len(self.kept) - 1


def _message(error: BaseException) -> str:
    try:
        return str(error)[:TOLD]
    except BaseException:
        return ""


def line_of(answer: dict[str, Any]) -> bytes:
    """Return an answer as a line; one that is too long becomes an error."""
    line = json.dumps(answer).encode()
    if len(line) > MAX_LINE_BYTES:
        line = json.dumps(
            {"raised": NotPlainData.__name__, "said": "the value is too large", "id": answer["id"]}
        ).encode()
    return line + b"\n"


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there are no more requests."""
    server = Server()
    answers.write(b'{"ready": true}\n')
    answers.flush()
    for line in requests:
        request = json.loads(line)
        answers.write(line_of({**server.answer(request), "id": request["id"]}))
        answers.flush()


if __name__ == "__main__":
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    serve(requests, answers)
    os._exit(0)
