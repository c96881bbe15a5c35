"""JSON over HTTP to one inference server: kept connections, deadlines, failures by kind, versions of tokens."""

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
from agentrl.errors import EngineError, UsageError

KEEP_IDLE_S = 2.0
"""Seconds that an idle connection is kept; less than the 5 of servers, which would close one that is used again."""
LONGEST_QUOTE = 500
ATTEMPT_S = 5.0
"""Deadline of one attempt to reach a server that may still be starting."""
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 1.0
JSON_BODY = {"Content-Type": "application/json"}
STREAM_BUFFER = 1 << 24
"""Bytes of the longest event of a stream: SGLang repeats the whole answer in each."""


class Refused(ErrorStatus):
    """An error status of an inference server.

    Attributes:
        url: Address with the route.
        said: The server's message.
    """

    def __init__(self, url: str, status: int, said: str) -> None:
        super().__init__(f"{url} refused a request", status=status, got=f"{status}, {said!r}")
        self.url, self.said = url, said

    @property
    def may_pass(self) -> bool:
        """True for the statuses of a server that is starting, or of a proxy before it."""
        return self.status in (500, 502, 503, 504)


@dataclass(slots=True)
class _Attempt:
    """One request on its way."""

    is_first: bool = False
    """Its connection was made for it, and not kept from another request."""


_attempt: ContextVar[_Attempt] = ContextVar("attempt")


def _make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    _attempt.get().is_first = True
    family, kind, protocol, *_ = address
    return socket.socket(family=family, type=kind, proto=protocol)


class _Failures:
    """Deadline of a request, and the kinds of its failures; a class, because every turn passes one."""

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
    """The connections to one server. Used from one event loop; opened by the first request.

    Failures of every request: `ServerLost` when the connection cannot be made or breaks, or when the deadline passes
    (or another kind, which the caller names); `UsageError` for a refused or missing key; `Refused` for other error
    statuses; `EngineError` for an answer that is not JSON, and after `close`.

    Args:
        url: Base address, without a path.
        api_key_variable: Environment variable that holds the server's key; ``None`` sends no key.
    """

    def __init__(self, url: str, *, api_key_variable: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._key_variable = api_key_variable
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, route: str, *, deadline_s: float) -> Any:
        """Return the JSON that a route answers; ``None`` for an empty body."""
        return self._decode(route, await self._ask("GET", route, None, deadline_s))

    async def get_text(self, route: str, *, deadline_s: float) -> str:
        """Return the text that a route answers."""
        return (await self._ask("GET", route, None, deadline_s)).decode(errors="replace")

    async def answers(self, route: str, *, deadline_s: float) -> bool:
        """Return True if a route answers in time, without an error status."""
        try:
            await self.get_text(route, deadline_s=deadline_s)
        except EngineError:
            return False
        return True

    async def wait_until_up(self, route: str, engine: str, *, deadline_s: float) -> None:
        """Wait until the first route that an engine is asked for answers.

        Raises:
            UsageError: something else answers.
            ServerLost: it does not answer within the deadline.
        """
        end, wait_s = time.monotonic() + deadline_s, FIRST_WAIT_S
        while True:
            try:
                limit_s = max(FIRST_WAIT_S, min(end - time.monotonic(), ATTEMPT_S))
                await self.get_text(route, deadline_s=limit_s)
            except (ServerLost, Refused) as error:
                if isinstance(error, Refused) and not error.may_pass:
                    raise UsageError(
                        f"{error.url} is not {engine}'s",
                        got=f"{error.status}, {error.said[:80]!r}",
                        expected=f"{engine} behind this address",
                        hint="check engine.type, and give the address of the server itself, without a path such as /v1",
                    ) from error
                if time.monotonic() + wait_s >= end:
                    raise ServerLost(f"{self.url} did not become ready in {deadline_s:g} s", got=error) from error
            else:
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def post(
        self,
        route: str,
        body: Mapping[str, Any] | None = None,
        *,
        deadline_s: float | None,
        late: type[EngineError] = ServerLost,
    ) -> Any:
        """Send JSON; the JSON of the answer, ``None`` for an empty body.

        Args:
            route: Path with its query, from the slash on.
            body: The JSON; ``None`` sends no body.
            deadline_s: Most seconds until the whole answer is here; ``None``: the caller bounds the wait.
            late: Error of a missed deadline. An answer that may take long says nothing about the server's health.
        """
        data = None if body is None else orjson.dumps(body)
        return self._decode(route, await self._ask("POST", route, data, deadline_s, late))

    async def stream(
        self,
        route: str,
        body: Mapping[str, Any],
        tell: Callable[[Any], None],
        *,
        deadline_s: float | None,
        late: type[EngineError] = ServerLost,
    ) -> None:
        """Send JSON, and give `tell` the JSON of each server-sent event up to ``[DONE]``; else like `post`."""
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
                    tell(self._told(route, event))
        if not is_whole:
            raise ServerLost(f"{self.url}{route} broke off in the middle of an answer")

    def _told(self, route: str, event: bytes) -> Any:
        told = self._decode(route, event)
        if isinstance(told, dict) and isinstance(failed := told.get("error"), dict):
            self._refuse(route, int(failed.get("code") or 500), error_message(event))
        return told

    async def order(self, route: str, body: Mapping[str, Any], *, deadline_s: float) -> None:
        """Send JSON to a route whose answer says nothing beyond its status."""
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
        """Ask, and ask again where a kept connection turns out to be closed: servers do that after an error."""
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
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._key(),
            )
        return self._session

    def _key(self) -> dict[str, str]:
        if self._key_variable is None:
            return {}
        key = os.environ.get(self._key_variable)
        if not key:
            hint = f"put the key of {self.url} into it, or remove engine.api_key_variable"
            raise UsageError(f"the environment variable {self._key_variable} is not set", hint=hint)
        return {"Authorization": f"Bearer {key}"}

    def classify(self, route: str, error: BaseException) -> None:
        """Raise what a failure of a request means; errors that do not come from the connection pass."""
        what = f"{self.url}{route} cannot be reached"
        if not isinstance(error, (aiohttp.ClientError, OSError, RuntimeError)):
            return
        if self._closed:
            raise EngineError(f"the connection to {self.url} was closed during a request") from error
        if isinstance(error, TimeoutError):
            raise ServerLost(what, got=repr(error)) from error
        if not isinstance(error, RuntimeError):  # aiohttp's words for a session closed under it, handled above
            raise ServerLost(what, got=f"{type(error).__name__}: {error}") from error

    def _refuse(self, route: str, status: int, said: str) -> bytes:
        if status == 401:
            hint = "name the environment variable that holds its key in engine.api_key_variable"
            if self._key_variable is not None:
                hint = f"put a valid key into the environment variable {self._key_variable}"
            raise UsageError(f"{self.url} refuses the key", got=f"{status}, {said!r}", hint=hint)
        raise Refused(self.url + route, status, said)

    def _decode(self, route: str, answer: bytes) -> Any:
        if not answer:
            return None
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            got = repr(answer[:200].decode(errors="replace"))
            raise EngineError(f"{self.url}{route} answered something that is not JSON", got=got) from error

    async def close(self) -> None:
        """Close the connections; requests that run fail as `EngineError`. Idempotent."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def error_message(answer: bytes) -> str:
    """Extract a server's error message: from its JSON, or the start of the text."""
    try:
        body = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return answer[:LONGEST_QUOTE].decode(errors="replace")
    while isinstance(body, dict) and (inner := next((body[k] for k in ("error", "message", "detail") if k in body), 0)):
        body = inner
    return str(body)[:LONGEST_QUOTE]


@contextmanager
def decoding(what: str, answer: object, *, expected: str | None = None) -> Iterator[None]:
    """Raise `EngineError` where an answer lacks what the block reads from it."""
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(what, got=repr(answer)[:300], expected=expected) from error


FIRST_VERSION = "default"
"""Label of the weights that a server starts with."""


def decode_versions(spans: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Version of each of `count` tokens, from spans ``[start, end)`` that cover them one after the other.

    A span may be empty: SGLang writes one for an answer that was paused before its first token.
    """
    versions: list[int] = []
    is_whole = True
    for span in spans:
        is_whole &= span["start"] == len(versions) <= span["end"]
        versions += [decode_version(span["version"])] * (span["end"] - span["start"])
    if not is_whole or len(versions) != count:
        raise EngineError(
            "the server's version spans do not cover the answer", got=list(spans), expected=f"{count} tokens"
        )
    return versions


def decode_version(label: str) -> int:
    """Return the version of a label, 0 for the weights that the server started with; others raise `EngineError`."""
    if label == FIRST_VERSION:
        return 0
    try:
        return int(label)
    except ValueError as error:
        raise EngineError(
            "the server has weights of an unknown version", got=label, expected=f"a number or {FIRST_VERSION!r}"
        ) from error
