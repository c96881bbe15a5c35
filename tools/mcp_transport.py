"""Messages of MCP servers: those that break the protocol in common ways are mended before the `mcp` package reads them.

The package refuses a whole list of tools because of one tool, and loses messages that its JSON parser refuses, errors
without a code, and answers without an id: their calls never end, or end with an error that does not tell what the
server said. Many servers are written without a package that would check what they send.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from agentrl.message import encodable_json
from agentrl.tool.results import as_text

from .mcp_arguments import EXTRA, LIST_KEYWORDS, MAP_KEYWORDS, SINGLE_KEYWORDS
from .mcp_results import first_problem

INTERNAL_ERROR = -32603
"""JSON-RPC's code of an error that has no valid code."""
NOT_FOUND = 404
"""HTTP status of a session that the server does not have."""
_ENCODING = ("content-encoding", "content-length", "transfer-encoding")
"""Headers of a body that has been decoded."""

_VALUES = ("default", "const")
"""Keywords of JSON Schema whose value may be null."""
_DEEPEST = 50
"""Maximum levels of schemas within schemas that are mended."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def mended(
    transport: AbstractAsyncContextManager[Any], forward: Callable[[Any, Any, Requests], Awaitable[None]] | None = None
) -> AsyncIterator[Any]:
    """Open a transport of the `mcp` package, and mend the messages that the server sends.

    Args:
        transport: Transport to open.
        forward: Coroutine that reads messages from the first stream and sends those that can be read to the second.
    """
    async with transport as (read, write):
        sending, receiving = EXTRA.load("anyio").create_memory_object_stream(0)
        requests = Requests(write)
        forwarding = asyncio.ensure_future((forward or _forward)(read, sending, requests))
        try:
            with receiving:
                yield receiving, requests
        finally:
            forwarding.cancel()
            await asyncio.wait({forwarding})


class Requests:
    """A stream of messages to the server that knows which requests wait for their answer."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.waiting: set[Any] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> Requests:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stream.__aexit__(*error)

    async def send(self, message: Any) -> None:
        """Send a message."""
        sent = message.message
        if hasattr(sent, "method") and hasattr(sent, "id"):
            self.waiting.add(sent.id)
        elif getattr(sent, "method", None) == "notifications/cancelled":
            self.waiting.discard((sent.params or {}).get("requestId"))
        await self._stream.send(message)

    def complete(self, message: Any) -> None:
        """Note an answer; an error that names no request answers the only one that waits."""
        if hasattr(message, "error") and message.id is None and len(self.waiting) == 1:
            (message.id,) = self.waiting
        if not hasattr(message, "method"):
            self.waiting = {one for one in self.waiting if str(one) != str(message.id)}  # some answer with a text


async def _forward(read: Any, sending: Any, requests: Requests) -> None:
    anyio = EXTRA.load("anyio")
    with sending, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        async for message in read:
            readable = mend(message)
            if not isinstance(readable, Exception):
                requests.complete(readable.message)
            await sending.send(readable)


def line_of(error: Any) -> str:
    """Return the line that the package could not read."""
    first = error.errors()[0]
    if first["type"] in ("json_invalid", "string_unicode"):
        return str(first["input"])
    inputs = [one["input"] for one in error.errors()]
    whole = next((one for one in inputs if isinstance(one, dict)), inputs[0])  # it lacks a method, as all answers do
    return json.dumps(whole)


def mend(message: Any) -> Any:
    """Mend a message, or the error of one that the package could not read."""
    if isinstance(message, EXTRA.load("pydantic").ValidationError):
        message = session_message(line_of(message).encode())
    result = getattr(getattr(message, "message", None), "result", None)
    if isinstance(result, dict) and isinstance(result.get("tools"), list):
        result["tools"] = _readable_tools(result["tools"])
    if isinstance(result, dict) and "isError" in result:
        result["isError"] = bool(result["isError"])
    return message


def session_message(raw: bytes) -> Any:
    """Return a mended message for the package; the error if it cannot be mended."""
    try:
        message = EXTRA.load("mcp.types").jsonrpc_message_adapter.validate_json(mended_message(raw))
    except EXTRA.load("pydantic").ValidationError as error:
        return error
    return EXTRA.load("mcp.shared.message").SessionMessage(message)


def mended_message(raw: bytes, request_id: Any = None) -> bytes:
    """Mend the JSON of a message: a byte order mark, texts cut within a pair, and answers that break the protocol.

    An answer without a version gets one, without an id that of its request, and without a result the error that it has
    none; an error gets a code and a message. Other bytes are returned as they are.
    """
    raw = raw.removeprefix(codecs.BOM_UTF8)
    raw = encodable_json(raw) if b"\\u" in raw else raw
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    if not isinstance(message, dict) or "method" in message or not {"id", "jsonrpc"} & message.keys():
        return raw
    name = message.get("id")
    answer = {**message, "jsonrpc": "2.0", "id": request_id if name is None else name}
    if answer.get("error") is not None or answer.get("result") is None:
        answer = {key: value for key, value in answer.items() if key != "result"}
        error = answer.get("error")
        answer["error"] = _mended_error("the server answered without a result" if error is None else error)
    return raw if answer == message else json.dumps(answer).encode()


def _mended_error(error: Any) -> dict[str, Any]:
    """Return an error with a code and a message: its own if they are valid, else all that it says."""
    code, message = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
    if type(code) is int and isinstance(message, str):
        return dict(error)
    if isinstance(code, str) and code.removeprefix("-").isdecimal():
        code = int(code)
    if not isinstance(message, str) or not message:
        message = as_text(error)
    data = error.get("data") if isinstance(error, dict) else None
    return {"code": code if type(code) is int else INTERNAL_ERROR, "message": message, "data": data}


def http_client(errors: Any, **options: Any) -> Any:
    """Make an HTTP client that mends messages, and writes the latest answer that is an HTTP error to `errors`."""
    httpx = EXTRA.load("httpx2")

    class Events(httpx.AsyncByteStream):  # type: ignore[misc, name-defined]
        """A stream of events with mended messages."""

        def __init__(self, response: Any, request_id: Any) -> None:
            self._response = response
            self._request_id = request_id

        async def __aiter__(self) -> AsyncIterator[bytes]:
            rest = b""
            async for piece in self._response.aiter_bytes():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield _mended_line(line, self._request_id) + b"\n"
            yield rest

        async def aclose(self) -> None:
            await self._response.aclose()

    class Client(httpx.AsyncClient):  # type: ignore[misc, name-defined]
        """A client that mends what the server sends."""

        async def send(self, request: Any, **options: Any) -> Any:
            response = await super().send(request, **options)
            kind = response.headers.get("content-type", "").lower()
            is_error = response.status_code >= 400
            if response.is_redirect or not (is_error or kind.startswith(("application/json", "text/event-stream"))):
                return response
            headers = [one for one in response.headers.multi_items() if one[0].lower() not in _ENCODING]
            mended = {"status_code": response.status_code, "headers": headers, "request": request}
            request_id = _id_of(request.content) if request.method == "POST" else None
            if kind.startswith("text/event-stream"):
                return httpx.Response(**mended, stream=Events(response, request_id))
            body = await response.aread()
            await response.aclose()
            if is_error and request.method == "POST":  # servers may refuse to open a stream by GET
                errors.seek(0)
                errors.truncate()
                errors.write(f"HTTP {response.status_code} {response.reason_phrase}: {response.text.strip()}")
                errors.flush()
            return httpx.Response(**mended, content=body if response.status_code == NOT_FOUND else mended_message(body))

    return Client(**options)


def _mended_line(line: bytes, request_id: Any) -> bytes:
    """Mend the message in a line of a stream of events."""
    if not line.startswith(b"data:"):
        return line
    data = line[5:].strip()
    mended_data = mended_message(data, request_id)
    return line if mended_data == data else b"data: " + mended_data


def _id_of(request: bytes) -> Any:
    """Return the id of a request; ``None`` for other messages."""
    message = json.loads(request)
    return message.get("id") if isinstance(message, dict) and "method" in message else None


def _readable_tools(tools: list[Any]) -> list[Any]:
    """Return the tools that can be read, with mended schemas; the log names the others."""
    readable = []
    for tool in tools:
        described = _mended_tool(tool) if isinstance(tool, Mapping) else tool
        if (problem := _problem_of(described)) is None:
            readable.append(described)
        else:
            name = tool.get("name") if isinstance(tool, Mapping) else tool
            _log.warning("MCP tool %.80s is left out, because its description is invalid: %s", name, problem)
    return readable


def _problem_of(tool: Any) -> str | None:
    try:
        EXTRA.load("mcp.types").Tool.model_validate(tool, by_name=False)
    except EXTRA.load("pydantic").ValidationError as error:
        return first_problem(error)
    kind = tool["inputSchema"]["type"]
    return None if kind == "object" else f"inputSchema.type is {kind!r}, expected 'object'"


def _mended_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {key: value for key, value in tool.items() if value is not None}
    given = described.get("inputSchema", {})
    described["inputSchema"] = mended_schema(given) if isinstance(given, Mapping) else given
    output = described.get("outputSchema")
    if output is not None and not (isinstance(output, Mapping) and output.get("type") == "object"):
        del described["outputSchema"]  # results are only compared with it
    return described


def mended_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Mend the schema of a tool's arguments.

    Keywords with null count as missing, an empty list where a map of schemas belongs (as PHP writes an empty map) as an
    empty map, ``required`` among the properties as the keyword, and a missing ``type`` as ``object``.
    """
    mended_root = _mended_part(schema, 0)
    properties = mended_root.get("properties")
    if isinstance(properties, dict) and isinstance(required := properties.get("required"), list):
        mended_root["properties"] = {name: part for name, part in properties.items() if name != "required"}
        mended_root.setdefault("required", required)
    kind = mended_root.get("type", "object")
    return {**mended_root, "type": "object" if isinstance(kind, list) and "object" in kind else kind}


def _mended_part(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAP_KEYWORDS:
            value = {} if value in (None, []) else value
            if isinstance(value, Mapping):
                value = {name: _mended_entry(name, part, depth + 1) for name, part in value.items()}
        elif key in LIST_KEYWORDS and isinstance(value, list):
            value = [_mended_part(part, depth + 1) for part in value]
        elif key in SINGLE_KEYWORDS:
            value = _mended_part(value, depth + 1)
        if value is not None or key in _VALUES:
            kept[key] = value
    return kept


def _mended_entry(name: str, part: Any, depth: int) -> Any:
    """Mend one entry of a map of schemas; an entry that is not a schema accepts everything."""
    if isinstance(part, Mapping | bool) or (name == "required" and isinstance(part, list)):
        return _mended_part(part, depth)
    return {}
