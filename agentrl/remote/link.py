"""The connections to an environment server: requests that are repeated until they are answered, or patience ends.

All environments of an event loop that live on one server share one `Link`.
"""

from __future__ import annotations

import asyncio
import io
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from agentrl.errors import (
    AgentRLError,
    EnvironmentFailure,
    ToolError,
    UsageError,
)
from agentrl.remote.wire import (
    LARGEST_ANSWER,
    TOKEN_VARIABLE,
    Problem,
    from_json,
    to_json,
)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
CONNECT_S = 10.0
"""Seconds that a connection may take to be made."""
_LONGEST_QUOTE = 300
_PASSING = frozenset({502, 503, 504})
"""What a proxy says while the server behind it is away."""


class Unanswered(EnvironmentFailure):
    """The server was not reached, or had no room, until the timeout; whether it got the request is unknown."""


class SessionLost(EnvironmentFailure):
    """The server does not know the session (any more)."""


class NoProtocol(EnvironmentFailure):
    """The server answers what no environment server of agentrl would."""


class Link:
    """The connections to one server, for one event loop; opened by the first request.

    Every request of the protocol may be repeated: the server answers the second one as it did the first.

    Args:
        url: The server's address, without a slash at its end.
        service: What it is called in messages.
        token_variable: Environment variable with the token that is sent.
    """

    def __init__(self, url: str, *, service: str = "environment server", token_variable: str = TOKEN_VARIABLE) -> None:
        self.url = url
        self._service, self._token_variable = service, token_variable
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, method: str, route: str, body: Any = None, *, patience_s: float) -> Any:
        """The JSON that a request is answered with.

        Args:
            method: ``GET``, ``PUT``, ``POST`` or ``DELETE``.
            route: Path with its query, from the slash on.
            body: The request's JSON; ``None`` sends none.
            patience_s: Seconds for which a server that is lost or full is asked again.

        Raises:
            Unanswered: the server stayed lost or full.
            SessionLost: it does not know the session.
            NoProtocol: it is no environment server.
            EnvironmentFailure: its environment failed, or it does not understand the request.
            ToolError: for the policy.
            UsageError: the user must change something.
        """
        data = None if body is None else to_json(body)
        clock = asyncio.get_running_loop().time
        began, pause, tries = clock(), FIRST_PAUSE_S, 1
        while True:
            outcome = await self._try(method, route, data)
            if not isinstance(outcome, Unanswered):
                break
            if clock() - began + pause > patience_s:
                got = f"{outcome.got}; {tries} tries in {clock() - began:.1f} s"
                raise Unanswered(outcome.what, got=got, hint=outcome.hint) from outcome.__cause__
            await asyncio.sleep(pause)
            pause, tries = min(2 * pause, LONGEST_PAUSE_S), tries + 1
        if isinstance(outcome, AgentRLError):
            raise outcome
        return outcome

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _try(self, method: str, route: str, data: bytes | None) -> Any:
        """One request: the JSON of its answer, or the error to raise."""
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            async with self._open().request(
                method,
                self.url + route,
                data=None if data is None else io.BytesIO(data),
                headers=headers,
                allow_redirects=False,
            ) as response:
                if (response.content_length or 0) > LARGEST_ANSWER:
                    return NoProtocol(f"{self.url}{route} answers too much", got=f"{response.content_length} bytes")
                status, answer = response.status, await response.read()
        except aiohttp.InvalidURL as error:
            return UsageError(f"{self.url} is no address", got=error)
        except (aiohttp.ClientError, OSError) as error:
            lost = Unanswered(f"the {self._service} {self.url} is lost", got=f"{type(error).__name__}: {error}")
            lost.__cause__ = error
            return lost
        return self._read(route, status, answer)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            token = os.environ.get(self._token_variable)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                headers={"Authorization": f"Bearer {token}"} if token else {},
            )
        return self._session

    def _read(self, route: str, status: int, answer: bytes) -> Any:
        try:
            body = from_json(answer)
            if status < 300:
                return body
            kind, message = Problem(body["error"]["kind"]), str(body["error"]["message"])
        except (ValueError, KeyError, TypeError):
            got = f"status {status}, {answer[:_LONGEST_QUOTE].decode(errors='replace')!r}"
            kind_of = Unanswered if status in _PASSING else NoProtocol
            return kind_of(f"{self.url}{route} is no {self._service}", got=got)
        return self._error(kind, message)

    def _error(self, kind: Problem, message: str) -> AgentRLError:
        match kind:
            case Problem.TOOL:
                return ToolError(message)
            case Problem.USAGE:
                return UsageError(f"the {self._service} {self.url} refuses: {message}")
            case Problem.TOKEN:
                hint = f"put its token into the environment variable {self._token_variable}"
                return UsageError(f"the {self._service} {self.url} refuses the token", got=message, hint=hint)
            case Problem.BUSY:
                hint = "raise --max-sessions there, or lower environment.max_concurrent here"
                return Unanswered(f"the {self._service} {self.url} is full", got=message, hint=hint)
            case Problem.SESSION:
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
    """Lends the running loop's link, and closes it when its last user gives it back.

    Args:
        url: The server's address.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()

    def borrow(self) -> Link:
        """The link of the running loop."""
        shared = self._of_loop.setdefault(asyncio.get_running_loop(), _Shared(Link(self.url)))
        shared.users += 1
        return shared.link

    async def give_back(self) -> None:
        """One `borrow` less."""
        shared = self._of_loop[asyncio.get_running_loop()]
        shared.users -= 1
        if shared.users == 0:
            await shared.link.close()


def ask_now(url: str, route: str, *, patience_s: float) -> Any:
    """Ask for a route outside any event loop, or inside one that may wait: a thread of its own asks.

    Raises:
        AgentRLError: as `Link.ask` does.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="agentrl-environment-server") as thread:
        return thread.submit(asyncio.run, _ask_once(url, route, patience_s)).result()


async def _ask_once(url: str, route: str, patience_s: float) -> Any:
    link = Link(url)
    try:
        return await link.ask("GET", route, patience_s=patience_s)
    finally:
        await link.close()
