"""Connections to an environment server, which retry requests until an answer or a timeout.

All environments of one server share one `Link` per event loop.
"""

from __future__ import annotations

import asyncio
import io
import os
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from agentrl.errors import AgentRLError, EnvironmentFailure, ToolError, UsageError
from agentrl.errors.foreign import DaemonThreads
from agentrl.remote.wire import MAX_ANSWER_BYTES, TOKEN_VARIABLE, RefusalKind, from_json, to_json

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
LINK_CONNECT_S = 10.0
"""Timeout of a connection attempt in seconds."""
LINK_ANSWER_S = 30.0
"""Default timeout in seconds of answers that do not depend on an environment's or a sandbox's work."""
_MAX_QUOTE_CHARS = 300
_TEMPORARY = frozenset({502, 503, 504})
"""HTTP statuses of a proxy whose server is temporarily down."""
_THREADS = DaemonThreads("agentrl-environment-server")


class RequestTimeout(EnvironmentFailure):
    """The server stayed unreachable or full until the timeout; it may have received the request."""


class SessionLost(EnvironmentFailure):
    """The server has no session with this id, or has closed it."""


class ProtocolMismatch(EnvironmentFailure):
    """The server does not use the protocol of agentrl's environment servers."""


class Link:
    """Connections to one server for one event loop; the first request opens them.

    Every request of the protocol may be retried: the server returns its first answer again.

    Args:
        url: URL of the server, without a trailing slash.
        service: Name of the service in messages.
        token_variable: Environment variable with the token to send.
    """

    def __init__(self, url: str, *, service: str = "environment server", token_variable: str = TOKEN_VARIABLE) -> None:
        self.url = url
        self._service, self._token_variable = service, token_variable
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self, method: str, route: str, body: Any = None, *, patience_s: float, answer_s: float | None = LINK_ANSWER_S
    ) -> Any:
        """Send a request and return the JSON of its answer.

        Args:
            method: ``GET``, ``PUT``, ``POST`` or ``DELETE``.
            route: Path with its query, including the leading slash.
            body: JSON of the request; ``None`` sends no body.
            patience_s: Seconds for which requests to an unreachable or full server are retried.
            answer_s: Timeout of one answer, after which the server counts as unreachable; ``None`` if the caller
                enforces a deadline on the requested work.

        Raises:
            RequestTimeout: the server stayed unreachable, unresponsive or full.
            SessionLost: the server has no such session.
            ProtocolMismatch: the server is not an environment server.
            EnvironmentFailure: the server's environment failed, or the server rejected the request as malformed.
            ToolError: a tool call failed; the message is for the policy.
            UsageError: the user must change something.
        """
        data = None if body is None else to_json(body)
        clock = asyncio.get_running_loop().time
        began, pause, tries = clock(), FIRST_PAUSE_S, 1
        while True:
            outcome = await self._try(method, route, data, answer_s)
            if not isinstance(outcome, RequestTimeout):
                break
            if clock() - began + pause > patience_s:
                got = f"{outcome.got}; {tries} tries in {clock() - began:.1f} s"
                raise RequestTimeout(outcome.what, got=got, hint=outcome.hint) from outcome.__cause__
            await asyncio.sleep(pause)
            pause, tries = min(2 * pause, MAX_PAUSE_S), tries + 1
        if isinstance(outcome, AgentRLError):
            raise outcome
        return outcome

    async def close(self) -> None:
        """Close the connections; idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _try(self, method: str, route: str, data: bytes | None, answer_s: float | None) -> Any:
        """Send one request and return the JSON of its answer, or the error to raise."""
        server = f"the {self._service} {self.url}"
        try:
            async with asyncio.timeout(answer_s):
                return await self._request(method, route, data)
        except aiohttp.InvalidURL as error:
            return UsageError(f"{self.url} is not a valid URL", got=error)
        except (aiohttp.ClientError, OSError) as error:
            if type(error) is TimeoutError:
                hint = "it accepts connections but does not answer: restart it, or check the address"
                lost = RequestTimeout(
                    f"{server} is silent", got=f"no answer to {method} {route} in {answer_s} s", hint=hint
                )
            else:
                lost = RequestTimeout(f"the connection to {server} failed", got=f"{type(error).__name__}: {error}")
            lost.__cause__ = error
            return lost

    async def _request(self, method: str, route: str, data: bytes | None) -> Any:
        headers = {} if data is None else {"Content-Type": "application/json"}
        async with self._open().request(
            method,
            self.url + route,
            data=None if data is None else io.BytesIO(data),
            headers=headers,
            allow_redirects=False,
        ) as response:
            if (response.content_length or 0) > MAX_ANSWER_BYTES:
                what = f"the answer of {self.url}{route} is too large"
                return ProtocolMismatch(what, got=f"{response.content_length} bytes")
            return self._read(route, response.status, await response.read())

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            token = os.environ.get(self._token_variable)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=LINK_CONNECT_S),
                headers={"Authorization": f"Bearer {token}"} if token else {},
            )
        return self._session

    def _read(self, route: str, status: int, answer: bytes) -> Any:
        try:
            body = from_json(answer)
            if status < 300:
                return body
            kind, message = RefusalKind(body["error"]["kind"]), str(body["error"]["message"])
        except (ValueError, KeyError, TypeError):
            got = f"status {status}, {answer[:_MAX_QUOTE_CHARS].decode(errors='replace')!r}"
            kind_of = RequestTimeout if status in _TEMPORARY else ProtocolMismatch
            return kind_of(f"no {self._service} found at {self.url}{route}", got=got)
        return self._error(kind, message)

    def _error(self, kind: RefusalKind, message: str) -> AgentRLError:
        match kind:
            case RefusalKind.TOOL:
                return ToolError(message)
            case RefusalKind.USAGE:
                return UsageError(f"the {self._service} {self.url} refused the request: {message}")
            case RefusalKind.TOKEN:
                hint = f"put its token into the environment variable {self._token_variable}"
                return UsageError(f"the {self._service} {self.url} refused the token", got=message, hint=hint)
            case RefusalKind.BUSY:
                hint = "raise --max-sessions there, or lower environment.max_concurrent here"
                return RequestTimeout(f"the {self._service} {self.url} is full", got=message, hint=hint)
            case RefusalKind.SESSION:
                return SessionLost(f"the {self._service} {self.url} lost a session", got=message)
            case _:
                return EnvironmentFailure(
                    f"the {self._service.removesuffix(' server')} at {self.url} failed", got=message
                )


@dataclass(slots=True)
class _Shared:
    link: Link
    users: int = 0


class Links:
    """Links to one server, one per event loop; a link is closed by its last user's `give_back`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()

    def borrow(self) -> Link:
        """Return the link of the running event loop."""
        shared = self._of_loop.setdefault(asyncio.get_running_loop(), _Shared(Link(self.url)))
        shared.users += 1
        return shared.link

    async def give_back(self) -> None:
        """End one `borrow`."""
        shared = self._of_loop[asyncio.get_running_loop()]
        shared.users -= 1
        if shared.users == 0:
            await shared.link.close()


def ask_blocking(url: str, route: str, *, patience_s: float, answer_s: float = LINK_ANSWER_S) -> Any:
    """Send a GET request from a new thread and block until it is answered; a running event loop blocks as well.

    Ctrl-C abandons the thread, which ends when its request times out or when the process ends.

    Raises:
        AgentRLError: as in `Link.ask`.
    """
    return _THREADS.submit(lambda: asyncio.run(_ask_once(url, route, patience_s, answer_s))).result()


async def _ask_once(url: str, route: str, patience_s: float, answer_s: float) -> Any:
    link = Link(url)
    try:
        return await link.ask("GET", route, patience_s=patience_s, answer_s=answer_s)
    finally:
        await link.close()
