"""Proxy of sandboxes with an allow-list: ``CONNECT`` and plain HTTP, to the hosts of the list.

head read and checked ─► name resolved here ─► address checked ─► connected to that address ─► bytes both ways

``HTTP_PROXY`` and ``HTTPS_PROXY`` point programs to it; they have no other network access. For a tunnel, only the host
and port of ``CONNECT`` are checked. A plain request is rebuilt from its parsed head with the checked ``Host``, and is
the only one on its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from agentrl.sandbox.allow_list import Address, AllowList, Host, read_place

HEAD_S = 10.0
"""Timeout in seconds for the head of a request."""
TARGET_CONNECT_S = 20.0
TUNNEL_LINGER_S = 10.0
"""Timeout in seconds for sending the last data to a server."""
MAX_HEAD_BYTES = 64 * 1024
PIECE = 65536
LOOKUPS = 4
"""Maximum concurrent DNS lookups of one sandbox; others wait."""
HTTP_PORT = 80
_LINE = re.compile(rb"([A-Z]{1,20}) ([\x21-\x7e]+) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_ABSOLUTE = re.compile(r"(?i:http)://([^/?#]+)(/[^#]*|\?[^#]*)?")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[\t\x20-\x7e]*)?\r\n")
_HOP_BY_HOP = frozenset(
    b"connection,proxy-connection,keep-alive,te,trailer,upgrade,proxy-authorization,proxy-authenticate,host".split(b",")
)
Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
_names = ThreadPoolExecutor(8, "agentrl-names")
"""Threads for DNS lookups, separate from the event loop's, so that a hanging name server blocks nothing else."""
_LEFT = (OSError, asyncio.IncompleteReadError)
"""Errors when one side has closed a connection."""


class ProxyRefusal(Exception):
    """The proxy rejects a request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """Head of a request."""

    method: str
    host: Host
    port: int
    path: str
    """Path with query; empty for a tunnel."""
    headers: tuple[tuple[bytes, bytes], ...]
    """Forwarded headers, without the host."""
    size: int | None
    """Bytes of the body; ``None`` for a chunked body."""

    @property
    def head(self) -> bytes:
        """Head of the request for the server."""
        shown = f"[{self.host}]" if isinstance(self.host, ipaddress.IPv6Address) else str(self.host)
        target = shown if self.port == HTTP_PORT else f"{shown}:{self.port}"
        lines = [f"{self.method} {self.path} HTTP/1.1".encode(), f"Host: {target}".encode()]
        lines += [name + b": " + value for name, value in self.headers]
        return b"\r\n".join([*lines, b"Connection: close", b"", b""])


def read_request(head: bytes) -> Request:
    """Parse a head strictly: requests that servers could parse differently are rejected.

    Raises:
        ProxyRefusal: the head is invalid (status 400).
    """
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    line = _LINE.fullmatch(first)
    if line is None:
        raise ProxyRefusal(400, "the request line is invalid")
    method, target = line[1].decode(), line[2].decode()
    if method == "CONNECT":
        host, port = _read_target(target)
        if port is None:
            raise ProxyRefusal(400, "CONNECT needs HOST:PORT")
        return Request(method, host, port, "", (), 0)
    address = _ABSOLUTE.fullmatch(target)
    if address is None:
        raise ProxyRefusal(400, "this is a proxy: it accepts CONNECT HOST:PORT and METHOD http://HOST/PATH")
    host, port = _read_target(address[1])
    path = address[2] or "/"
    headers = [_read_header(one) for one in lines]
    kept, size = _filter_headers(headers)
    return Request(method, host, port or HTTP_PORT, path if path.startswith("/") else f"/{path}", kept, size)


def _read_target(text: str) -> tuple[Host, int | None]:
    try:
        return read_place(text)
    except ValueError as error:
        raise ProxyRefusal(400, str(error)) from error


def _read_header(line: bytes) -> tuple[bytes, bytes]:
    found = _HEADER.fullmatch(line)
    if found is None:
        raise ProxyRefusal(400, "a header is invalid")
    return found[1], found[2].rstrip(b" \t")


def _filter_headers(headers: list[tuple[bytes, bytes]]) -> tuple[tuple[tuple[bytes, bytes], ...], int | None]:
    """Return the headers for the server, and the size of the body."""
    by_name: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        by_name.setdefault(name.lower(), []).append(value)
    sizes, codings = by_name.get(b"content-length", []), by_name.get(b"transfer-encoding", [])
    if len(sizes) + len(codings) > 1 or len(by_name.get(b"host", [])) > 1:
        raise ProxyRefusal(400, "the body size or the host is given twice")
    if any(not re.fullmatch(rb"[0-9]{1,18}", size) for size in sizes) or any(c.lower() != b"chunked" for c in codings):
        raise ProxyRefusal(400, "the size of the body is invalid")
    named = {word.strip().lower() for value in by_name.get(b"connection", []) for word in value.split(b",")}
    dropped = _HOP_BY_HOP | (named - {b"content-length", b"transfer-encoding"})
    kept = tuple((name, value) for name, value in headers if name.lower() not in dropped)
    return kept, None if codings else int(sizes[0]) if sizes else 0


class HostProxy:
    """Proxy of one sandbox."""

    def __init__(self, allowed: AllowList, *, resolve: Resolve | None = None) -> None:
        self._allowed = allowed
        self._resolve = resolve or _look_up
        self._lookups = asyncio.Semaphore(LOOKUPS)
        self._serving: set[asyncio.Task[None]] = set()

    def protocol(self) -> asyncio.BaseProtocol:
        """Make the protocol of one connection to the proxy."""
        reader = asyncio.StreamReader(limit=MAX_HEAD_BYTES)
        return asyncio.StreamReaderProtocol(reader, lambda *ends: self._begin(self._serve(*ends)))

    def protocol_to(self, host: Host, port: int) -> Callable[[], asyncio.BaseProtocol]:
        """Return a protocol factory for raw connections to one listed host and port."""
        request = Request("CONNECT", host, port, "", (), 0)

        def make() -> asyncio.BaseProtocol:
            reader = asyncio.StreamReader(limit=PIECE)
            return asyncio.StreamReaderProtocol(reader, lambda *ends: self._begin(self._serve_straight(request, *ends)))

        return make

    async def close(self) -> None:
        """End all connections. Idempotent."""
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    def _begin(self, serving: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(serving)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(*_LEFT):
            try:
                request = await _receive_head(reader)
                async with self._server(request) as (answers, server):
                    if request.method == "CONNECT":
                        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                        await _run_pair(_copy(reader, server), _copy(answers, writer), is_tunnel=True)
                    else:
                        server.write(request.head)
                        await _run_pair(
                            _send_body(reader, server, request.size), _copy(answers, writer), is_tunnel=False
                        )
            except ProxyRefusal as refused:
                writer.write(_answer(refused.status, str(refused)))

    async def _serve_straight(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.closing(writer), contextlib.suppress(ProxyRefusal, *_LEFT):
            async with self._server(request) as (answers, server):
                await _run_pair(_copy(reader, server), _copy(answers, writer), is_tunnel=True)

    @contextlib.asynccontextmanager
    async def _server(self, request: Request) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        try:
            async with asyncio.timeout(TARGET_CONNECT_S):
                answers, server = await self._connect(request, f"{request.host}:{request.port}")
        except TimeoutError:
            raise ProxyRefusal(504, f"{request.host}:{request.port} does not answer") from None
        try:
            yield answers, server
            server.close()
            async with asyncio.timeout(TUNNEL_LINGER_S):
                await server.wait_closed()
        finally:
            server.transport.abort()

    async def _connect(self, request: Request, target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self._allowed.permits(request.host, request.port):
            raise ProxyRefusal(403, f"this sandbox may not reach {target} (see sandbox.network of the config)")
        addresses = await self._addresses(request)
        allowed = [one for one in addresses if self._may_lead_to(one, request.port)]
        if not allowed:
            raise ProxyRefusal(403, f"{target} does not resolve to a public or listed address")
        problem = ""
        for address in allowed:
            try:
                return await asyncio.open_connection(str(address), request.port, limit=PIECE)
            except OSError as error:
                problem = error.strerror or type(error).__name__
        raise ProxyRefusal(502, f"{target} cannot be reached: {problem}")

    async def _addresses(self, request: Request) -> list[Address]:
        if not isinstance(request.host, str):
            return [request.host]
        await self._lookups.acquire()
        looking = asyncio.ensure_future(self._resolve(request.host, request.port))
        looking.add_done_callback(self._release_lookup)
        try:
            found = await asyncio.shield(looking)
        except OSError as error:
            raise ProxyRefusal(502, f"{request.host} has no address: {error.strerror or error}") from error
        return [ipaddress.ip_address(one) for one in found]

    def _release_lookup(self, looking: asyncio.Future[list[str]]) -> None:
        """Start the next lookup when this one's thread is free, even if its request was abandoned."""
        self._lookups.release()
        if not looking.cancelled():
            looking.exception()

    def _may_lead_to(self, address: Address, port: int) -> bool:
        if self._allowed.permits(getattr(address, "ipv4_mapped", None) or address, port):
            return True
        return self._allowed.permits_address(address, port) and not _is_this_machine(address)


async def _look_up(name: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(_names, lambda: socket.getaddrinfo(name, port, type=socket.SOCK_STREAM))
    return [str(one[4][0]) for one in found]


def _is_this_machine(address: Address) -> bool:
    """Return True for an address of this machine, according to the routing table; no data is sent."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))
        except OSError:
            return False
        return bool(probe.getsockname()[0] == str(address))


async def _receive_head(reader: asyncio.StreamReader) -> Request:
    try:
        async with asyncio.timeout(HEAD_S):
            return read_request(await reader.readuntil(b"\r\n\r\n"))
    except TimeoutError:
        raise ProxyRefusal(408, "the request did not arrive in time") from None
    except asyncio.LimitOverrunError:
        raise ProxyRefusal(431, "the head of the request is too long") from None


async def _run_pair(
    sending: Coroutine[Any, Any, None], receiving: Coroutine[Any, Any, None], *, is_tunnel: bool
) -> None:
    """Run both copies until one fails or both have ended; a plain request ends with its response."""
    tasks = [asyncio.create_task(sending), asyncio.create_task(receiving)]
    if not is_tunnel:
        tasks[1].add_done_callback(lambda _: tasks[0].cancel())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(PIECE):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _send_body(reader: asyncio.StreamReader, server: asyncio.StreamWriter, size: int | None) -> None:
    """Send a body of the given size; further data is an error, because it would be a second request."""
    if size is None:
        await _send_chunks(reader, server)
    while size:
        data = await reader.read(min(size, PIECE))
        if not data:
            raise ConnectionError("the body is incomplete")
        size -= len(data)
        server.write(data)
        await server.drain()
    if await reader.read(1):
        raise ConnectionError("only one request per connection is allowed")


async def _send_chunks(reader: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
    while True:
        line = _CHUNK.fullmatch(await _line_of(reader))
        if line is None:
            raise ConnectionError("a chunk is invalid")
        left = int(line[1], 16)
        if left == 0:
            break
        server.write(b"%x\r\n" % left)
        while left:
            data = await reader.readexactly(min(left, PIECE))
            left -= len(data)
            server.write(data)
            await server.drain()
        if await reader.readexactly(2) != b"\r\n":
            raise ConnectionError("a chunk is invalid")
        server.write(b"\r\n")
    while await _line_of(reader) != b"\r\n":  # trailers are not forwarded
        pass
    server.write(b"0\r\n\r\n")


async def _line_of(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        raise ConnectionError("a line is too long") from error


def _answer(status: int, text: str) -> bytes:
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status} Refused by the sandbox's proxy\r\nContent-Type: text/plain; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def variables(port: int) -> Mapping[str, str]:
    """Return the environment variables that make programs use the proxy.

    Args:
        port: Port on the sandbox's 127.0.0.1.
    """
    url, direct = f"http://127.0.0.1:{port}", "127.0.0.1,localhost,::1"
    given = {"http_proxy": url, "https_proxy": url, "no_proxy": direct}
    return {**given, **{name.upper(): value for name, value in given.items()}}
