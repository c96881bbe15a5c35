"""HTTP listener that limits connections, host names, headers and bodies, because clients may be hostile.

- Above the maximum number of connections, a new one replaces the connection that has waited longest for a complete
  request, so that slow clients do not block others. It is dropped if all others are being answered or are new.
- A connection without a complete request for `IDLE_CONNECTION_S` is closed, and so is one whose body is late.
- A body that is too long is rejected with status 413 as soon as its length is known; a declared length is checked
  before the body is read. Bodies are decoded here, because the HTTP server answers unknown encodings by itself.
- The response to a request with a broken or unread body announces that the connection will be closed.
- Without a token, the ``Host`` of a request must be this machine: after DNS rebinding, a page of another site sends
  that site's name. The ``Origin``, if any, must also be this machine: browsers allow any page to send simple requests.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import math
import socket
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from agentrl.errors import UsageError
from agentrl.remote.wire import HEALTH, Refusal, RefusalKind

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

IDLE_CONNECTION_S = 30.0
"""Timeout in seconds for a request's headers, counted from the connection or the previous answer; clients keep idle
connections half as long."""
BODY_S = 30.0
"""Timeout in seconds for the next chunk of a request's body; for the whole body, one second is added for every
`SLOWEST` bytes of its maximum size."""
SLOWEST = 256 * 1024
BODY_LINGER_S = 2.0
"""Seconds for which the rest of a rejected body is read and discarded, so that the client receives the answer."""
CODINGS = ("gzip", "deflate")
"""Content encodings that are read."""
DECODED_BYTES = 1 << 20
"""Maximum bytes that are decoded before other requests proceed."""
DEEPEST = 100
"""Maximum nesting depth of lists and objects in a request."""
FIRST_REQUEST_S = 2.0
"""Seconds for the first request of a new connection, after which another connection may replace it."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def _is_servers_fault(record: logging.LogRecord) -> bool:
    """Return False for log records about clients that disconnected or sent malformed HTTP."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return not isinstance(error, ConnectionError | HttpProcessingError | web.RequestPayloadError)


_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(_is_servers_fault)


@web.middleware
async def _announce_close(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer with ``Connection: close`` if the body is broken or not read to its end, since no request can follow it.

    Without this header, a client would send its next request on a connection that is about to be closed.
    """
    try:
        response = await handler(request)
    except web.HTTPException as refusal:
        _close_if_unread(request, refusal)
        raise
    _close_if_unread(request, response)
    return response


def _close_if_unread(request: web.Request, response: web.StreamResponse) -> None:
    if not response.prepared and (request.content.exception() is not None or not request.content.is_eof()):
        response.force_close()


def make_runner(application: web.Application) -> web.AppRunner:
    """Create a runner that serves HTTP on given connections."""
    application.middlewares.insert(0, _announce_close)
    return web.AppRunner(
        application,
        access_log=None,
        logger=_http_log,
        shutdown_timeout=1.0,
        keepalive_timeout=IDLE_CONNECTION_S,
        lingering_time=BODY_LINGER_S,
        auto_decompress=False,
    )


class Listener:
    """HTTP server on one address."""

    def __init__(self, application: web.Application, *, most_connections: int) -> None:
        application.middlewares.insert(0, self._note)
        self._runner = make_runner(application)
        self._slots = _ConnectionSlots(most_connections)
        self._listening: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> str:
        """Start listening and return the base URL.

        Raises:
            UsageError: the port is taken.
        """
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(
                lambda: _ConnectionLimiter(server, self._slots), host, port, backlog=128
            )
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}", got=error.strerror, hint="choose another --host or --port"
            ) from error
        found, number = self._listening.sockets[0].getsockname()[:2]
        return f"http://[{found}]:{number}" if ":" in found else f"http://{found}:{number}"

    @web.middleware
    async def _note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record the request that a connection is answering."""
        answering, connection = self._slots.answering, request.protocol
        answering[connection] = request
        try:
            return await handler(request)
        finally:
            answering.pop(connection, None)

    async def close(self) -> None:
        """Stop listening and close all connections; idempotent."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()


class _ConnectionSlots:
    """Connections of a server up to a maximum number."""

    def __init__(self, most: int) -> None:
        self.answering: dict[web.RequestHandler, web.Request] = {}
        """The request of each connection that has sent a request's headers."""
        self._most = most
        self._since: dict[web.RequestHandler, float] = {}
        """Start time of each connection; includes closed ones."""

    def take(self, server: web.Server, protocol: web.RequestHandler) -> bool:
        """Admit a connection, if necessary in place of one without a complete request; return False if all are busy."""
        now, connections = time.monotonic(), server.connections
        if len(self._since) > 2 * self._most:
            self._since = {one: self._since[one] for one in connections if one in self._since}
        if len(connections) >= self._most and not self._make_room(connections, now):
            return False
        self._since[protocol] = now
        return True

    def _make_room(self, connections: Sequence[web.RequestHandler], now: float) -> bool:
        """Free a slot by closing the connection that has waited longest; return False if none is waiting."""
        is_open = {one: one.transport is not None and not one.transport.is_closing() for one in connections}
        if sum(is_open.values()) < self._most:
            return True
        waiting = next((one for one in connections if is_open[one] and self._is_waiting(one, now)), None)
        if waiting is None or waiting.transport is None:
            return False
        waiting.transport.abort()
        return True

    def _is_waiting(self, connection: web.RequestHandler, now: float) -> bool:
        """Return True if a connection has no complete request after `FIRST_REQUEST_S`."""
        request = self.answering.get(connection)
        is_incomplete = request is None or not request.content.is_eof()
        return is_incomplete and now - self._since.get(connection, -math.inf) > FIRST_REQUEST_S


class _ConnectionLimiter(asyncio.Protocol):
    """Initial protocol of a connection, which drops it if the server has no free slot."""

    def __init__(self, server: web.Server, slots: _ConnectionSlots) -> None:
        self._server, self._slots = server, slots

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        protocol = self._server()
        if not self._slots.take(self._server, protocol):
            transport.abort()
            return
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


def own_names(host: str) -> Set[str]:
    """Return this machine's host names, without its IP addresses, for a server that listens on `host`."""
    if host in LOCAL_NAMES:
        return LOCAL_NAMES
    name = socket.gethostname().lower()
    return LOCAL_NAMES | {host.lower(), name, name.partition(".")[0]}


def is_own_host(host: str, names: Set[str]) -> bool:
    """Return True if the ``Host`` of a request is an IP address or one of `names`.

    >>> [is_own_host(host, LOCAL_NAMES) for host in ("127.0.0.1:8300", "[::1]:80", "localhost", "evil.example:80", "")]
    [True, True, True, False, False]
    """
    try:
        name = (URL(f"//{host}").host or "").lower()
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True


def is_own_origin(origin: str, names: Set[str]) -> bool:
    """Return True if the ``Origin`` of a request is this machine.

    >>> [is_own_origin(page, LOCAL_NAMES) for page in ("http://localhost:3000", "http://127.0.0.2", "http://8.8.8.8")]
    [True, True, False]
    >>> [is_own_origin(page, LOCAL_NAMES) for page in ("https://site.example.com", "null", "http://[")]
    [False, False, False]
    """
    try:
        name = (URL(origin).host or "").lower()
    except ValueError:
        return False
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name in names


def is_own_page(request: web.Request, names: Set[str]) -> bool:
    """Return True unless ``Host`` or ``Origin`` shows that a page of another web site sent the request."""
    origin = request.headers.get("Origin")
    return is_own_host(request.host, names) and (origin is None or is_own_origin(origin, names))


def guard(token: str | None, host: str) -> Any:
    """Make a middleware that admits requests with the token or, if there is none, requests to this machine's names.

    Args:
        token: Token that clients must send; ``None`` requires none.
        host: Address on which the server listens.
    """
    wanted = None if token is None else f"Bearer {token}".encode()
    names = own_names(host)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if wanted is None and not is_own_page(request, names):
            raise web.HTTPForbidden(reason="without a token this server accepts only requests to its own names")
        if wanted is not None and request.path != HEALTH and not hmac.compare_digest(sent, wanted):
            raise Refusal(RefusalKind.TOKEN, "wrong token" if sent else "no token")
        return await handler(request)

    return check


async def read_bytes_of(request: web.Request, largest: int) -> bytes:
    """Read a request's body.

    It may have at most `largest` bytes, both as it is sent and decoded.

    Raises:
        web.HTTPRequestEntityTooLarge: the body, or its stated length, is larger.
        web.HTTPRequestTimeout: the body did not arrive in time.
        web.HTTPUnsupportedMediaType: the body has an encoding that is not read.
        web.HTTPBadRequest: the body does not match its headers, such as ``Content-Encoding``.
        ConnectionError: the client closed the connection.
    """
    stated = request.content_length or 0
    if stated > largest:
        raise web.HTTPRequestEntityTooLarge(max_size=largest, actual_size=stated)
    decoder = _decoder_of(request)
    data, sent, loop = bytearray(), 0, asyncio.get_running_loop()
    last = loop.time() + BODY_S + largest / SLOWEST
    try:
        async with asyncio.timeout(BODY_S) as limit:  # aiohttp reports a broken chunk only if it came with the headers
            async for piece in request.content.iter_any():
                limit.reschedule(min(last, loop.time() + BODY_S))
                sent += len(piece)
                for decoded in [piece] if decoder is None else decoder.decode(piece):
                    data += decoded
                    if max(sent, len(data)) > largest:  # encoded data may decode to nothing, endlessly
                        raise web.HTTPRequestEntityTooLarge(max_size=largest, actual_size=max(sent, len(data)))
                    if decoder is not None:
                        await asyncio.sleep(0)
        if decoder is not None:
            decoder.finish()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error
    except (web.RequestPayloadError, zlib.error) as error:
        coding = "none" if decoder is None else decoder.coding
        raise web.HTTPBadRequest(
            reason=f"the request's body cannot be decoded: Content-Encoding is {coding!r}"
        ) from error
    return bytes(data)


def _decoder_of(request: web.Request) -> _BodyDecoder | None:
    """Return the decoder of a request's body; ``None`` if it is not encoded."""
    coding = ", ".join(request.headers.getall("Content-Encoding", ())).strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in CODINGS:
        raise web.HTTPUnsupportedMediaType(
            reason=f"Content-Encoding {coding[:80]!a} is not read here: expected {', '.join(CODINGS)} or none",
            headers={"Accept-Encoding": ", ".join(CODINGS)},
        )
    return _BodyDecoder(coding)


class _BodyDecoder:
    """Decoder of a body in one of `CODINGS`."""

    def __init__(self, coding: str) -> None:
        self.coding = coding
        self._inflater: zlib._Decompress | None = None

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Decode a part of the body, in pieces of at most `DECODED_BYTES`.

        Raises:
            zlib.error: the body is not encoded in this way.
        """
        while True:
            inflater = self._inflater = self._inflater or self._start(data)
            piece = inflater.decompress(data, DECODED_BYTES)
            yield piece
            data = inflater.unconsumed_tail
            if inflater.eof and inflater.unused_data.strip(b"\0"):  # gzip allows several members
                if self.coding != "gzip":
                    raise zlib.error("data after the end")
                data, self._inflater = inflater.unused_data, None
            elif not data and len(piece) < DECODED_BYTES:
                return

    def _start(self, data: bytes) -> zlib._Decompress:
        if self.coding == "gzip":
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        has_header = data[0] & 0xF == 8  # some clients send deflated data without zlib's header
        return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)

    def finish(self) -> None:
        """Check that the body is complete.

        Raises:
            zlib.error: its end is missing.
        """
        if self._inflater is None or not self._inflater.eof:
            raise zlib.error("the end is missing")


async def read_body(request: web.Request, largest: int) -> tuple[bytes, Mapping[str, Any]]:
    """Read a request's body and return its bytes and its JSON object.

    Raises:
        Refusal: the body is not a JSON object, or is nested too deeply.
        web.HTTPException: as in `read_bytes_of`.
    """
    if request.content_type != "application/json":  # pages of other sites cannot send this type without permission
        raise Refusal(
            RefusalKind.REQUEST, f"the request's content is {request.content_type}, expected application/json"
        )
    raw = await read_bytes_of(request, largest)
    try:
        body = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Refusal(RefusalKind.REQUEST, f"the request is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(RefusalKind.REQUEST, f"the request is {raw[:80]!r}, expected an object")
    if raw.count(b"[") + raw.count(b"{") > DEEPEST and is_deep(body):
        raise Refusal(RefusalKind.REQUEST, f"the request has more than {DEEPEST} levels of lists and objects")
    return raw, body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a duplicate key")
    return found


def is_deep(body: Any) -> bool:
    """Return True if JSON has more than `DEEPEST` levels of lists and objects, which recursive code may not handle."""
    level = [body]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
