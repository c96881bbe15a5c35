"""The client of an environment server: from the server's address to an environment that plays the served one.

`remote_spec` makes the spec of an address. Its environment, a `RemoteEnvironment`, has the optional parts that the
served one has (tools, an expert, an action space, ...), and its tasks are fetched page by page when they are first
asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar, cast
from urllib.parse import quote

from agentrl.env import AsyncEnv, EnvironmentSpec, Isolation
from agentrl.errors import AgentRLError, EnvironmentFailure, UsageError
from agentrl.message import Content
from agentrl.remote.env_methods import (
    CALL_TOOL,
    EXPERT,
    EXPERT_ACTION,
    EXPERT_MISTAKE,
    METHODS,
    OPTIONAL_PARTS,
    RESET,
    RESTORE,
    SAMPLE,
    STATE_KEY,
    STEP,
    EnvMethod,
    RemoteTool,
    ResetResult,
)
from agentrl.remote.link import Link, Links, NoProtocol, SessionLost, Unanswered, ask_now
from agentrl.remote.wire import (
    HEALTH,
    INFO,
    PROTOCOL,
    SESSIONS,
    TASKS,
    TASKS_PER_PAGE,
    VERSION,
    Served,
    read_served,
    read_task,
    spec_facts,
    to_json,
)
from agentrl.task import Task
from agentrl.tool import Tool, ToolResult

P = ParamSpec("P")
R = TypeVar("R")


class CallSession(Protocol):
    """Asks a session of the server for something."""

    def __call__(self, method: EnvMethod[P, R], *arguments: P.args, **_: P.kwargs) -> Awaitable[R]:
        """Ask, and return the result."""


class RemoteExpert:
    """The expert that the environment made over there.

    Args:
        call: Asks the session.
    """

    def __init__(self, call: CallSession) -> None:
        self._call = call

    async def act(self, observation: Content) -> str:
        """Choose the next action, given the observation that followed the last one."""
        return (await self._call(EXPERT_ACTION, observation)).text


class RemoteFallibleExpert(RemoteExpert):
    """One that can make mistakes."""

    async def mistake(self, rng: random.Random) -> str | None:
        """Draw a mistake in place of the last action, with `rng` as here: its state goes there and back."""
        version, numbers, gauss = rng.getstate()
        mistake, state = await self._call(EXPERT_MISTAKE, [version, list(numbers), gauss])
        version, numbers, gauss = state
        rng.setstate((version, tuple(numbers), gauss))
        return mistake


class RemoteActionSpace:
    """The environment's action space, as far as a random policy uses it.

    Args:
        call: Asks the session.
    """

    def __init__(self, call: CallSession) -> None:
        self._call = call
        self._seed: int | None = None

    def seed(self, seed: int) -> None:
        """Seed the next samples."""
        self._seed = seed

    async def sample(self) -> str:
        """Draw a random action."""
        seed, self._seed = self._seed, None
        return await self._call(SAMPLE, seed)


PATIENCE_S = 20.0
"""Seconds for which a lost or full server is asked again, unless the option ``patience_s`` says otherwise."""


@dataclass(slots=True)
class RemoteTasks:
    """A split of a served environment's tasks.

    Args:
        url: The server's address.
        split: The split's name.
        patience_s: Seconds for which a lost server is asked again.

    Raises:
        UsageError: there is no such split, or its data is not there.
        EnvironmentFailure: the server is lost.
    """

    url: str
    split: str
    patience_s: float = PATIENCE_S
    _size: int = field(init=False)
    _pages: dict[int, list[dict[str, Any]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._size = int(self._ask(0)["total"])

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self._size:
            raise IndexError(index)
        page, place = divmod(index, TASKS_PER_PAGE)
        if page not in self._pages:
            self._ask(page)
        return read_task(self._pages[page][place], self.url)

    def _ask(self, page: int) -> Any:
        query = f"start={page * TASKS_PER_PAGE}&count={TASKS_PER_PAGE}"
        answer = ask_now(self.url, f"{TASKS}/{quote(self.split, safe='')}?{query}", patience_s=self.patience_s)
        self._pages[page] = answer["tasks"]
        return answer


CLOSE_S = 5.0
"""Seconds that closing may wait for the server, which closes what is left behind by itself."""


class RemoteEnvironment(AsyncEnv):
    """One session of a server, opened by the first reset.

    What the served environment does not offer is not there: `optional_part` finds nothing. A call that was given up
    (a deadline, a lost connection) is repeated before the next one, so that none is lost and none is done twice.

    Args:
        served: What the server told.
        links: Connections to it.
        patience_s: Seconds for which a lost or full server is asked again.
    """

    def __init__(self, served: Served, links: Links, *, patience_s: float = PATIENCE_S) -> None:
        self.served = served
        self.action_hint = served.action_hint
        self._links = links
        self._link: Link | None = None
        self._patience_s = patience_s
        self._session: str | None = None
        self._number = 0
        self._pending: tuple[str, Mapping[str, Any]] | None = None
        """The call whose answer is not known."""
        self._turn = asyncio.Lock()
        self._state_key: str | None = None
        self._tools: tuple[Tool, ...] = ()
        self._space = RemoteActionSpace(self._call)
        self._own_parts: Mapping[str, Callable[[], Any]] = {
            "state_key": lambda: self._read_state_key,
            "restore": lambda: self._restore,
            "expert": lambda: self._begin_expert,
            "tools": lambda: self._tools,
            "action_space": lambda: self._space,
        }

    def __getattr__(self, name: str) -> Any:
        """Return a part of the served environment: a method asks its server."""
        served: Served | None = self.__dict__.get("served")
        if served is None or name not in served.parts & OPTIONAL_PARTS:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        own = self._own_parts.get(name)
        return functools.partial(self._call, METHODS[name]) if own is None else own()

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Start an episode; in a new session where the old one was closed meanwhile.

        Raises:
            EnvironmentFailure: the server or its environment failed.
            UsageError: what the environment or the server refuses.
        """
        begin = functools.partial(self._call, RESET, seed, options or {})
        if self._session is None:
            await self._open_session()
        try:
            start: ResetResult = await begin()
        except SessionLost:
            await self._open_session()
            start = await begin()
        self.action_hint = start.action_hint
        self._tools = start.tools
        for tool in start.tools:
            cast("RemoteTool", tool).remote = self._call_tool
        return start.observation, dict(start.info)

    async def step(self, action: str) -> tuple[Content, float, bool, bool, dict[str, Any]]:
        """Take an action.

        Raises:
            EnvironmentFailure: the server or its environment failed.
        """
        result = (await self._call(STEP, action)).result
        return result.observation, result.reward, result.terminated, result.truncated, dict(result.info)

    async def close(self) -> None:
        """End the session; one that cannot be ended now ends with its lease."""
        session, self._session = self._session, None
        if self._link is None:
            return
        if session is not None:
            with contextlib.suppress(AgentRLError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._link.ask("DELETE", f"{SESSIONS}/{session}", patience_s=0.0)
        self._link = None
        await self._links.give_back()

    async def _open_session(self) -> None:
        if self._link is None:
            self._link = self._links.borrow()
        session = secrets.token_hex(16)
        self._number, self._pending, self._session = 0, None, session
        body = {"fingerprint": self.served.fingerprint}
        await self._link.ask("PUT", f"{SESSIONS}/{session}", body, patience_s=self._patience_s)

    async def _call(self, method: EnvMethod[P, R], *arguments: P.args, **_: P.kwargs) -> R:
        """Ask the session for something, after what was asked before."""
        async with self._turn:
            if self._session is None:
                raise EnvironmentFailure(f"{method.name} of {self.served.url} comes before reset")
            if self._pending is not None:
                with contextlib.suppress(_Answered):
                    await self._send(*self._pending)
            body = {"number": self._number + 1, **method.write_arguments(*arguments)}
            _check_size(method, body, self.served.url)
            self._number += 1
            self._pending = method.name, body
            try:
                return method.result.read(await self._send(*self._pending))
            except _Answered as answered:
                raise answered.error from answered.error.__cause__

    async def _send(self, method: str, body: Mapping[str, Any]) -> Any:
        """Send a numbered call; it stays pending until the server has answered it, one way or the other."""
        assert self._link is not None
        route = f"{SESSIONS}/{self._session}/{method}"
        self._state_key = None
        try:
            answer = await self._link.ask("POST", route, body, patience_s=self._patience_s)
        except (SessionLost, Unanswered):
            raise
        except AgentRLError as error:
            self._pending = None
            raise _Answered(error) from error
        self._pending = None
        self._state_key = answer.get("state_key")
        return answer

    async def _read_state_key(self) -> str:
        """Return the key that came with the last answer; ask for it where none did."""
        return self._state_key if self._state_key is not None else str(await self._call(STATE_KEY))

    async def _restore(self, data: Any) -> None:
        if self._session is None:
            await self._open_session()
        await self._call(RESTORE, data)

    async def _begin_expert(self) -> RemoteExpert:
        is_fallible = await self._call(EXPERT)
        return (RemoteFallibleExpert if is_fallible else RemoteExpert)(self._call)

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return (await self._call(CALL_TOOL, name, arguments)).normalize(name)


class _Answered(Exception):
    """The server has answered with an error: nothing is pending."""

    def __init__(self, error: AgentRLError) -> None:
        super().__init__(str(error))
        self.error = error


class MakeRemote:
    """Makes environments that play a served one; they share connections. Can be sent to worker processes.

    Args:
        served: What the server told.
    """

    def __init__(self, served: Served) -> None:
        self.served = served
        self._links = Links(served.url)

    def __call__(self, *, patience_s: float = PATIENCE_S) -> RemoteEnvironment:
        """An environment; the server is asked when it is reset."""
        return RemoteEnvironment(self.served, self._links, patience_s=patience_s)

    def __reduce__(self) -> tuple[type[MakeRemote], tuple[Served]]:
        return MakeRemote, (self.served,)


def _check_size(method: EnvMethod[..., Any], body: Mapping[str, Any], url: str) -> None:
    """Refuse what the server would refuse, before it counts as a call."""
    if (size := len(to_json(body))) > (most := method.largest_request):
        raise UsageError(f"this is too much for {url}", got=f"{size} bytes", expected=f"at most {most}")


OPTIONS = {"patience_s": PATIENCE_S}
"""The options of every remote environment; those of the served one belong to its server."""


def remote_spec(url: str) -> EnvironmentSpec:
    """The spec of the environment that is served at `url`; its name is the address.

    Raises:
        UsageError: no answer, an answer of something else than an environment server of this version, or the token
            is wrong.
    """
    _check_version(url, _ask(url, HEALTH))
    served = read_served(url, _ask(url, INFO))
    return EnvironmentSpec(
        name=url,
        make=MakeRemote(served),
        tasks=functools.partial(RemoteTasks, url),
        isolation=Isolation.INLINE,
        options=OPTIONS,
        **spec_facts(served),
    )


def _ask(url: str, route: str) -> Any:
    try:
        return ask_now(url, route, patience_s=0.0)
    except Unanswered as error:
        hint = "start one: agentrl env serve NAME --port PORT"
        raise UsageError(f"no environment server answers at {url}", got=error.got, hint=hint) from error
    except NoProtocol as error:
        raise _no_server(url, error.got) from error


def _check_version(url: str, health: Any) -> None:
    if not isinstance(health, dict) or health.get("protocol") != PROTOCOL:
        raise _no_server(url, repr(health)[:200])
    if VERSION not in health.get("versions", ()):
        raise UsageError(
            f"the environment server {url} speaks another version of the protocol",
            got=", ".join(map(str, health.get("versions", ()))) or "none",
            expected=VERSION,
            hint="install the same version of agentrl on both sides",
        )


def _no_server(url: str, got: object) -> UsageError:
    return UsageError(
        f"{url} is no environment server",
        got=got,
        expected="the address that agentrl env serve prints, /split may follow",
    )
