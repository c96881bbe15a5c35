"""HTTP listening with bounds on connections, host names, headers and bodies, for clients that may be hostile.

- Beyond a number of connections, a new one takes the place of the one that has been without a complete request for
  longest, so that slow clients shut nobody out; where all are being answered, or have just come, it is dropped.
- A connection without a complete request for `IDLE_S` is closed, and so is one whose body does not arrive in time.
- A body is refused with status 413 as soon as it is known to be too long: before it is read where its length is stated.
- Without a token, a request must name this machine as its host: a page of another site, whose name was made to lead
  here (DNS rebinding), names that site. If the request says from which page it comes, that page must be this machine's
  as well: browsers let every page send plain requests here.
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
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from agentrl.errors import UsageError
from agentrl.remote.wire import HEALTH, Problem, Refusal

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

IDLE_S = 30.0
"""Seconds in which a request's headers must arrive, from the connection or the answer before; clients keep idle
connections for half as long."""
BODY_S = 30.0
"""Seconds in which a request's body must arrive, and one more for every `SLOWEST` bytes that it may have."""
SLOWEST = 256 * 1024
LINGER_S = 2.0
"""Seconds for which the rest of a refused body is thrown away, so that the client reads the answer."""
DEEPEST = 100
"""Levels of lists and objects in a request."""
PATIENCE_S = 2.0
"""Seconds that a new connection has for its first request before it may lose its place to another."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def _is_servers_fault(record: logging.LogRecord) -> bool:
    """Return True unless a client that left, or sent broken HTTP, made aiohttp write a log record."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    return not isinstance(error, ConnectionError | HttpProcessingError | web.RequestPayloadError)


_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(_is_servers_fault)


def make_runner(application: web.Application) -> web.AppRunner:
    """Make what answers HTTP requests on connections, wherever these come from."""
    return web.AppRunner(
        application,
        access_log=None,
        logger=_http_log,
        shutdown_timeout=1.0,
        keepalive_timeout=IDLE_S,
        lingering_time=LINGER_S,
    )


class Listener:
    """Answers HTTP requests on one address.

    Args:
        application: What it answers.
        most_connections: How many connections there may be.
    """

    def __init__(self, application: web.Application, *, most_connections: int) -> None:
        application.middlewares.insert(0, self._note)
        self._runner = make_runner(application)
        self._places = _Places(most_connections)
        self._listening: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> str:
        """Begin to answer requests; gives the address.

        Raises:
            UsageError: the port is taken.
        """
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(
                lambda: _ConnectionLimiter(server, self._places), host, port, backlog=128
            )
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}", got=error.strerror, expected="another --host or --port"
            ) from error
        found, number = self._listening.sockets[0].getsockname()[:2]
        return f"http://[{found}]:{number}" if ":" in found else f"http://{found}:{number}"

    @web.middleware
    async def _note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Remember which request a connection is answering."""
        answering, connection = self._places.answering, request.protocol
        answering[connection] = request
        try:
            return await handler(request)
        finally:
            answering.pop(connection, None)

    async def close(self) -> None:
        """Listen no more, and close all connections. Idempotent."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()


class _Places:
    """Places for connections: which of them are taken, and which can be given to another.

    Args:
        most: Number of places.
    """

    def __init__(self, most: int) -> None:
        self.answering: dict[web.RequestHandler, web.Request] = {}
        """The request of each connection that has sent the head of one."""
        self._most = most
        self._since: dict[web.RequestHandler, float] = {}
        """When each connection was made; some are closed."""

    def take(self, server: web.Server, protocol: web.RequestHandler) -> bool:
        """Take a place for a new connection, if need be that of one without a complete request; False: none is free."""
        now, connections = time.monotonic(), server.connections
        if len(self._since) > 2 * self._most:
            self._since = {known: self._since[known] for known in connections if known in self._since}
        if len(connections) >= self._most and not self._make_room(connections, now):
            return False
        self._since[protocol] = now
        return True

    def _make_room(self, connections: Sequence[web.RequestHandler], now: float) -> bool:
        """Close the connection that has waited for longest, unless a place is free; False: none waits."""
        is_open = {known: known.transport is not None and not known.transport.is_closing() for known in connections}
        if sum(is_open.values()) < self._most:
            return True
        waiting = next((known for known in connections if is_open[known] and self._is_waiting(known, now)), None)
        if waiting is None or waiting.transport is None:
            return False
        waiting.transport.abort()
        return True

    def _is_waiting(self, connection: web.RequestHandler, now: float) -> bool:
        """Return True if a connection has had time for a request, and none of it is complete."""
        request = self.answering.get(connection)
        is_incomplete = request is None or not request.content.is_eof()
        return is_incomplete and now - self._since.get(connection, -math.inf) > PATIENCE_S


class _ConnectionLimiter(asyncio.Protocol):
    """Entrance of a server, which drops a new connection if there is no place for it.

    Args:
        server: Makes the protocol of a connection.
        places: Of the server.
    """

    def __init__(self, server: web.Server, places: _Places) -> None:
        self._server, self._places = server, places

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        protocol = self._server()
        if not self._places.take(self._server, protocol):
            transport.abort()
            return
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


def own_names(host: str) -> Set[str]:
    """The names under which this machine is reached, besides its addresses, when it listens on `host`."""
    if host in LOCAL_NAMES:
        return LOCAL_NAMES
    name = socket.gethostname().lower()
    return LOCAL_NAMES | {host.lower(), name, name.partition(".")[0]}


def is_own_host(host: str, names: Set[str]) -> bool:
    """Return True if the ``Host`` of a request is an IP address or one of these names, and no web site.

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
    """Return True if the ``Origin`` of a request is a page of this machine.

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
    """Return True unless a page of another web site sent a request, as its ``Host`` or ``Origin`` tells."""
    origin = request.headers.get("Origin")
    return is_own_host(request.host, names) and (origin is None or is_own_origin(origin, names))


def guard(token: str | None, host: str) -> Any:
    """Make a middleware that admits requests with the token; without a token, those that name this machine.

    Args:
        token: What clients must send.
        host: Where the server listens.
    """
    wanted = None if token is None else f"Bearer {token}".encode()
    names = own_names(host)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if wanted is None and not is_own_page(request, names):
            raise web.HTTPForbidden(reason="without a token this server answers under its own names only")
        if wanted is not None and request.path != HEALTH and not hmac.compare_digest(given, wanted):
            raise Refusal(Problem.TOKEN, "wrong token" if given else "no token")
        return await handler(request)

    return check


async def read_bytes_of(request: web.Request, largest: int) -> bytes:
    """Read a request's body.

    Args:
        request: Its body has not been read.
        largest: Bytes that it may have.

    Raises:
        web.HTTPRequestEntityTooLarge: it has more, or says so.
        web.HTTPRequestTimeout: it did not arrive in time.
        web.HTTPBadRequest: it is not what its headers say, such as gzip.
        ConnectionError: the client has left.
    """
    told = request.content_length or 0
    if told > largest:
        raise web.HTTPRequestEntityTooLarge(max_size=largest, actual_size=told)
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S + largest / SLOWEST):
            async for piece in request.content.iter_any():
                data += piece
                if len(data) > largest:
                    raise web.HTTPRequestEntityTooLarge(max_size=largest, actual_size=len(data))
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error
    except web.RequestPayloadError as error:
        told_coding = request.headers.get("Content-Encoding", "none")
        raise web.HTTPBadRequest(
            text=f"the request's body cannot be decoded: Content-Encoding is {told_coding[:80]!r}"
        ) from error
    return bytes(data)


async def read_body(request: web.Request, largest: int) -> tuple[bytes, Mapping[str, Any]]:
    """Read a request's bytes, and the JSON object that they are.

    Raises:
        Refusal: they are no JSON object, or a too deep one.
        web.HTTPException: as `read_bytes_of`.
    """
    if request.content_type != "application/json":  # which pages of other sites cannot send unasked
        raise Refusal(Problem.REQUEST, f"the request's content is {request.content_type}, expected application/json")
    raw = await read_bytes_of(request, largest)
    try:
        body = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Refusal(Problem.REQUEST, f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(Problem.REQUEST, f"the request is {raw[:80]!r}, expected an object")
    if raw.count(b"[") + raw.count(b"{") > DEEPEST and is_deep(body):
        raise Refusal(Problem.REQUEST, f"the request has more than {DEEPEST} levels of lists and objects")
    return raw, body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def is_deep(body: Any) -> bool:
    """Return True if JSON has more than `DEEPEST` levels of lists and objects, at which code that reads it may fail."""
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
