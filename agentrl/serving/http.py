"""HTTP client of one inference server: connection reuse, deadlines, classified failures, weight versions."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from agentrl.engine import ErrorStatus, ServerLost
from agentrl.errors import AgentRLError, EngineError, UsageError, shorten

KEEP_IDLE_S = 2.0
"""Seconds before an idle connection is closed: below the servers' 5, so that a reused connection is not closed."""
MAX_QUOTED_CHARACTERS = 500
ATTEMPT_S = 5.0
"""Timeout of one attempt to reach a server that may still be starting."""
FIRST_ATTEMPT_WAIT_S = 0.1
MAX_ATTEMPT_WAIT_S = 1.0
UNREACHABLE_S = 8.0
"""Seconds before giving up on a server that refuses connections, if agentrl did not start it."""
CLEANUP_S = 10.0
"""Timeout of the cleanup request after a failed weight update."""
JSON_BODY = {"Content-Type": "application/json"}
STREAM_BUFFER = 1 << 24
"""Maximum bytes of one streamed event: SGLang repeats the whole answer in each."""
FIRST_VERSION = "default"
"""Label of the weights that a server starts with."""


class ServerStatusError(ErrorStatus):
    """Error status in an inference server's answer.

    Attributes:
        url: URL of the request.
        message: Error message of the server.
    """

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"{url} returned an error", status=status, got=f"{status}, {message!r}")
        self.url, self.message = url, message

    @property
    def is_transient(self) -> bool:
        """True if a server that is starting, or a proxy in front of it, may return this status."""
        return self.status in (500, 502, 503, 504)


@dataclass(slots=True)
class _Attempt:
    """One attempt to send a request."""

    is_first: bool = False
    """True if the request opened a new connection."""


_attempt: ContextVar[_Attempt] = ContextVar("attempt")


def _make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    _attempt.get().is_first = True
    family, kind, protocol, *_ = address
    return socket.socket(family=family, type=kind, proto=protocol)


class _Failures:
    """Context manager of a request's deadline and failures; a class, because it runs in every turn and must be fast."""

    __slots__ = ("_deadline_s", "_late", "_route", "_scope", "_session")

    def __init__(self, session: HttpSession, route: str, deadline_s: float | None, late: type[EngineError]) -> None:
        self._session, self._route, self._deadline_s, self._late = session, route, deadline_s, late
        self._scope = asyncio.timeout(deadline_s)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as late:
            what = f"{self._session.url}{self._route} missed its deadline"
            raise self._late(what, got=f"no answer in {self._deadline_s:g} s") from late
        if error is not None:
            self._session.classify(self._route, error)


class HttpSession:
    """Connections to one server, opened by the first request. Use from one event loop.

    Every request raises `ServerLost` if the connection fails, or if the deadline passes (unless the caller names
    another error), `UsageError` for a rejected or missing key, `ServerStatusError` for other error statuses, and
    `EngineError` for an answer that is not valid JSON and after `close`.

    Args:
        url: Base URL, without a path.
        api_key_variable: Environment variable that holds the server's API key; ``None`` sends no key.
        section: Config section with the key ``api_key_variable``, for hints.
    """

    def __init__(self, url: str, *, api_key_variable: str | None = None, section: str = "engine") -> None:
        self.url = url.rstrip("/")
        self._key_variable, self._section = api_key_variable, section
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, route: str, *, deadline_s: float) -> Any:
        """Send a GET request and return its JSON; ``None`` for an empty body."""
        return self._decode(route, await self._ask("GET", route, None, deadline_s))

    async def get_text(self, route: str, *, deadline_s: float) -> str:
        """Send a GET request and return its text."""
        return (await self._ask("GET", route, None, deadline_s)).decode(errors="replace")

    async def answers(self, route: str, *, deadline_s: float) -> bool:
        """Return True if a route answers before the deadline, without an error status."""
        try:
            await self.get_text(route, deadline_s=deadline_s)
        except EngineError:
            return False
        return True

    async def wait_until_up(self, route: str, engine: str, *, deadline_s: float, is_attached: bool = False) -> None:
        """Wait until a route of an engine answers.

        If the server should be running already (`is_attached`), refused connections end the wait after `UNREACHABLE_S`.

        Raises:
            UsageError: another program answers, or nothing listens at the address of an attached server.
            ServerLost: no answer before the deadline.
        """
        began, wait_s = time.monotonic(), FIRST_ATTEMPT_WAIT_S
        end = began + deadline_s
        while True:
            try:
                limit_s = max(FIRST_ATTEMPT_WAIT_S, min(end - time.monotonic(), ATTEMPT_S))
                await self.get_text(route, deadline_s=limit_s)
            except (ServerLost, ServerStatusError) as error:
                if isinstance(error, ServerStatusError) and not error.is_transient:
                    raise UsageError(
                        f"{error.url} is not a route of {engine}",
                        got=f"{error.status}, {error.message[:80]!r}",
                        expected=f"{engine} at this address",
                        hint="check engine.type, and give the address of the server itself, without a path such as /v1",
                    ) from error
                is_refused = isinstance(error.__cause__, aiohttp.ClientConnectorError)
                if is_attached and is_refused and time.monotonic() + wait_s >= began + UNREACHABLE_S:
                    raise UsageError(
                        f"nothing answers at {self.url}",
                        got=f"{type(error.__cause__).__name__}: {error.__cause__}",
                        expected=f"a running {engine} server",
                        hint="start the server, or correct its address (engine.servers, or --url)",
                    ) from error
                if time.monotonic() + wait_s >= end:
                    raise ServerLost(f"{self.url} did not become ready in {deadline_s:g} s", got=error) from error
            else:
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_ATTEMPT_WAIT_S)

    async def post(
        self,
        route: str,
        body: Mapping[str, Any] | None = None,
        *,
        deadline_s: float | None,
        late: type[EngineError] = ServerLost,
    ) -> Any:
        """Send a POST request with JSON and return the JSON of the answer; ``None`` for an empty body.

        Args:
            route: Path with its query, starting with a slash.
            body: JSON body; ``None`` sends no body.
            deadline_s: Seconds until the whole answer must have arrived; ``None`` if the caller limits the wait.
            late: Error raised at the deadline. Pass `EngineError` for answers that may take long, whose delay does not
                mean that the server is lost.
        """
        data = None if body is None else orjson.dumps(body)
        return self._decode(route, await self._ask("POST", route, data, deadline_s, late))

    async def stream(
        self,
        route: str,
        body: Mapping[str, Any],
        on_event: Callable[[Any], None],
        *,
        deadline_s: float | None,
        late: type[EngineError] = ServerLost,
    ) -> None:
        """Call `on_event` with the JSON of each server-sent event before ``[DONE]``; otherwise like `post`."""
        session, data = self._open(), orjson.dumps(body)
        is_whole = False
        async with (
            _Failures(self, route, deadline_s, late),
            await self._send(session, "POST", route, data, JSON_BODY, STREAM_BUFFER) as response,
        ):
            if response.status >= 400:
                self._refuse(route, response.status, error_message(await response.read()))
            async for line in response.content:
                word, _, event = line.strip().partition(b": ")
                is_whole = is_whole or (word, event) == (b"data", b"[DONE]")
                if word == b"data" and not is_whole:
                    on_event(self._decode_event(route, event))
        if not is_whole:
            raise ServerLost(f"{self.url}{route} closed the stream before the end of an answer")

    def _decode_event(self, route: str, event: bytes) -> Any:
        decoded = self._decode(route, event)
        if isinstance(decoded, dict) and isinstance(failed := decoded.get("error"), dict):
            self._refuse(route, int(failed.get("code") or 500), error_message(event))
        return decoded

    async def order(self, route: str, body: Mapping[str, Any], *, deadline_s: float) -> None:
        """Send JSON to a route and ignore the body of its answer."""
        await self._ask("POST", route, orjson.dumps(body), deadline_s)

    async def _ask(
        self,
        method: str,
        route: str,
        data: bytes | None,
        deadline_s: float | None,
        late: type[EngineError] = ServerLost,
    ) -> bytes:
        session = self._open()
        headers = {} if data is None else JSON_BODY
        async with _Failures(self, route, deadline_s, late):
            async with await self._send(session, method, route, data, headers) as response:
                answer = await response.read()
            if response.status < 400:
                return answer
        return self._refuse(route, response.status, error_message(answer))

    async def _send(
        self,
        session: aiohttp.ClientSession,
        method: str,
        route: str,
        data: bytes | None,
        headers: Mapping[str, str],
        read_bufsize: int | None = None,
    ) -> aiohttp.ClientResponse:
        """Send a request; retry if a reused connection turns out to be closed, as servers close them after an error."""
        while True:
            attempt = _Attempt()
            _attempt.set(attempt)
            try:
                return await session.request(
                    method, self.url + route, data=data, headers=headers, read_bufsize=read_bufsize
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if self._closed or attempt.is_first or isinstance(error, aiohttp.ClientConnectorError):
                    raise

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineError(f"the connection to {self.url} is closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_IDLE_S, socket_factory=_make_socket)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), headers=self._key()
            )
        return self._session

    def _key(self) -> dict[str, str]:
        if self._key_variable is None:
            return {}
        key = os.environ.get(self._key_variable)
        if not key:
            hint = f"set it to the key of {self.url}, or remove {self._section}.api_key_variable"
            raise UsageError(f"the environment variable {self._key_variable} is not set", hint=hint)
        return {"Authorization": f"Bearer {key}"}

    def classify(self, route: str, error: BaseException) -> None:
        """Raise the engine error for a connection failure; return for other errors."""
        what = f"{self.url}{route} cannot be reached"
        if not isinstance(error, (aiohttp.ClientError, OSError, RuntimeError)):
            return
        if self._closed:
            raise EngineError(f"the connection to {self.url} was closed during a request") from error
        if isinstance(error, TimeoutError):
            raise ServerLost(what, got=repr(error)) from error
        if not isinstance(error, RuntimeError):  # aiohttp raises it when its session is closed, handled above
            raise ServerLost(what, got=f"{type(error).__name__}: {error}") from error

    def _refuse(self, route: str, status: int, message: str) -> bytes:
        if status == 401:
            hint = f"name the environment variable that holds its key in {self._section}.api_key_variable"
            if self._key_variable is not None:
                hint = f"set the environment variable {self._key_variable} to a valid key"
            raise UsageError(f"{self.url} refuses the key", got=f"{status}, {message!r}", hint=hint)
        raise ServerStatusError(self.url + route, status, message)

    def _decode(self, route: str, answer: bytes) -> Any:
        if not answer:
            return None
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            got = repr(answer[:200].decode(errors="replace"))
            raise EngineError(f"the answer of {self.url}{route} is not valid JSON", got=got) from error

    async def close(self) -> None:
        """Close the connections; running requests raise `EngineError`. Idempotent."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def error_message(answer: bytes) -> str:
    """Extract a server's error message from its JSON; otherwise return the start of the text."""
    try:
        body = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return answer[:MAX_QUOTED_CHARACTERS].decode(errors="replace")
    while isinstance(body, dict) and (inner := next((body[k] for k in ("error", "message", "detail") if k in body), 0)):
        body = inner
    return str(body)[:MAX_QUOTED_CHARACTERS]


@contextmanager
def decoding(what: str, answer: object, *, expected: str | None = None) -> Iterator[None]:
    """Raise `EngineError` if an answer lacks a value that the block reads, or the value has another type."""
    try:
        yield
    except AgentRLError:
        raise
    except Exception as error:  # a server may send anything
        raise EngineError(what, got=repr(answer)[:300], expected=expected) from error


def decode_versions(spans: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Return the weight version of each of `count` tokens, from consecutive spans ``[start, end)`` that cover them.

    A span may be empty: SGLang sends one for an answer that was paused before its first token.
    """
    versions: list[int] = []
    for span in spans:
        start, end = span["start"], span["end"]
        if not start == len(versions) <= end <= count:
            break
        versions += [decode_version(span["version"])] * (end - start)
    else:
        if len(versions) == count:
            return versions
    raise EngineError(
        "the server's version spans do not cover the answer", got=repr(spans)[:300], expected=f"{count} tokens"
    )


def decode_version(label: object) -> int:
    """Return the version in a label; 0 for the initial weights. Raises `EngineError` for other labels."""
    if label == FIRST_VERSION:
        return 0
    try:
        return int(str(label))
    except ValueError as error:
        raise EngineError(
            "the server has weights of an unknown version",
            got=shorten(label),
            expected=f"a number or {FIRST_VERSION!r}",
        ) from error
