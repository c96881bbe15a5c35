"""Messages among the lines of an MCP server's standard output; requests whose answers cannot be read fail at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any

from .mcp_arguments import EXTRA
from .mcp_lines import OutputLines, UnreadableText, shown
from .mcp_results import first_problem
from .mcp_transport import Requests, line_of, mend, mended, session_message

PARSE_ERROR = -32700
"""JSON-RPC's code of a message that cannot be read."""
UNREADABLE_S = 1.0
"""Seconds until a request fails because of a text that seems to be its answer; a server may log an answer first."""
UNFINISHED_S = 5.0
"""Maximum seconds between two lines of a message."""
_reads_lines: ContextVar[bool] = ContextVar("_reads_lines", default=False)
"""True in tasks that read a server through `mended_lines`, which reports unreadable lines itself."""


def _is_logged(record: logging.LogRecord) -> bool:
    """Return False for a line that is reported here: the package would log a traceback for each."""
    return not (_reads_lines.get() and record.msg == "Failed to parse JSONRPC message from server")


logging.getLogger("mcp.client.stdio").addFilter(_is_logged)


def mended_lines(transport: AbstractAsyncContextManager[Any], report: Callable[[str], None]) -> Any:
    """Return a context manager that opens a transport over standard input and output; see `mended`.

    Args:
        transport: Transport to open, in the current task.
        report: Called with a description of each text that is not a message, such as a line of a log.
    """
    _reads_lines.set(True)
    return mended(transport, lambda read, sending, requests: _Answers(sending, requests, OutputLines(report)).run(read))


class _Answers:
    """Messages among the lines of a server, which are forwarded to the client.

    Args:
        sending: Stream to the client.
        requests: Requests of the client.
        lines: Reader of the lines.
    """

    def __init__(self, sending: Any, requests: Requests, lines: OutputLines) -> None:
        self._sending, self._requests, self._lines = sending, requests, lines
        self._failing: dict[Any, str] = {}
        """Problems of the answers to requests, by id."""
        self._due: float | None = None
        """Time at which the requests with problems fail, or an unfinished message is given up."""

    async def run(self, read: Any) -> None:
        """Forward messages until the server closes its standard output."""
        anyio, loop = EXTRA.load("anyio"), asyncio.get_running_loop()
        receiving: asyncio.Task[Any] | None = None
        with self._sending, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            try:
                while True:
                    receiving = receiving or asyncio.create_task(read.receive())
                    await asyncio.wait({receiving}, timeout=None if self._due is None else self._due - loop.time())
                    if receiving.done():
                        item, receiving = receiving.result(), None
                        await self._read(item)
                        self._set_due(loop.time())
                    if self._due is not None and self._due <= loop.time():
                        await self._refuse()
            except anyio.EndOfStream:
                await self._refuse()
            finally:
                if receiving is not None:
                    receiving.cancel()

    def _set_due(self, now: float) -> None:
        if self._failing:
            self._due = min(self._due or now + UNREADABLE_S, now + UNREADABLE_S)
        else:
            self._due = now + UNFINISHED_S if self._lines.is_open else None

    async def _read(self, item: Any) -> None:
        for found in self._texts(item):
            if isinstance(found, UnreadableText):
                self._note(found)
                continue
            message = found if hasattr(found, "message") else self._message(found)
            if message is not None:
                message = mend(message)
                self._requests.complete(message.message)
                await self._sending.send(message)

    def _texts(self, item: Any) -> Iterator[Any]:
        """Yield the messages that are complete with a line, and texts that cannot be read."""
        if not isinstance(item, Exception):
            if self._lines.is_batch:
                yield from self._lines.add(item.message.model_dump_json(by_alias=True, exclude_unset=True))
            else:
                yield from self._lines.skip()
                yield item
        else:
            yield from self._lines.add(line_of(item))

    def _message(self, value: Mapping[str, Any]) -> Any:
        """Return a message of the package; ``None`` if it is not valid."""
        message = session_message(json.dumps(value).encode())
        if not isinstance(message, Exception):
            return message
        text = shown(json.dumps(value))
        if "method" in value:
            self._lines.report(text)
        else:
            is_object = isinstance(value.get("result", {}), dict)
            problem = first_problem(message) if is_object else "its result is not an object"
            problem = f"{self._lines.place} ({problem}): {text}"
            name = value.get("id")
            self._note(UnreadableText(problem=problem, request_id=None if name is None else str(name)))
        return None

    def _note(self, text: UnreadableText) -> None:
        """Note the problem of the answer to the request that it names, or to all that wait."""
        for one in self._requests.waiting:
            if text.request_id in (None, str(one)):
                self._failing.setdefault(one, text.problem)

    async def _refuse(self) -> None:
        """Answer the requests whose answers cannot be read with an error."""
        for found in [] if self._failing else self._lines.give_up():
            if isinstance(found, UnreadableText):
                self._note(found)
        failing, self._failing, self._due = self._failing, {}, None
        for request_id in failing.keys() & self._requests.waiting:
            error = {"code": PARSE_ERROR, "message": f"the server's answer is not valid: {failing[request_id]}"}
            answer = session_message(json.dumps({"jsonrpc": "2.0", "id": request_id, "error": error}).encode())
            self._requests.complete(answer.message)
            await self._sending.send(answer)
