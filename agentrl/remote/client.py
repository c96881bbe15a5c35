"""Client of an environment server.

`remote_spec` returns the spec of the environment at a URL. The spec creates `RemoteEnvironment`s, which have the same
optional parts as the served environment (tools, an expert, an action space, ...). A run prefetches its tasks in the
order in which they are drawn.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from agentrl.remote.link import Link, Links, ProtocolMismatch, RequestTimeout, SessionLost, ask_blocking
from agentrl.remote.wire import (
    HEALTH,
    INFO,
    PROTOCOL,
    SESSIONS,
    TASKS,
    TASKS_PER_PAGE,
    VERSION,
    ServedEnvironment,
    read_served,
    read_task,
    spec_facts,
    to_json,
)
from agentrl.task import Task
from agentrl.tool import Tool, ToolResult

P = ParamSpec("P")
R = TypeVar("R")
ENVIRONMENT_PATIENCE_S = 20.0
"""Default of the option ``patience_s``: seconds for which requests to an unreachable or full server are retried."""
TASKS_S = 120.0
"""Timeout in seconds of an answer with tasks; the server may have to load its data first."""
CONCURRENT_FETCHES = 8
"""Maximum number of concurrent requests for tasks."""
ENVIRONMENT_CLOSE_S = 5.0
"""Maximum number of seconds to wait when closing a session; the server closes abandoned sessions itself."""
FIRST_ANSWER_S = 10.0
"""Timeout in seconds of a server's description."""
OPTIONS = {"patience_s": ENVIRONMENT_PATIENCE_S}
"""Options of every remote environment; the options of the served environment are set on its server."""


class CallSession(Protocol):
    """Function that calls a method in a session of the server."""

    def __call__(self, method: EnvMethod[P, R], *arguments: P.args, **_: P.kwargs) -> Awaitable[R]:
        """Call the method and return its result."""


class RemoteExpert:
    """The expert of an environment on a server."""

    def __init__(self, call: CallSession) -> None:
        self._call = call

    async def act(self, observation: Content) -> str:
        """Choose the next action, given the observation that followed the last one."""
        return (await self._call(EXPERT_ACTION, observation)).text


class RemoteFallibleExpert(RemoteExpert):
    """A remote expert that can make mistakes."""

    async def mistake(self, rng: random.Random) -> str | None:
        """Draw a mistake in place of the last action; the server advances the state of `rng`."""
        version, numbers, gauss = rng.getstate()
        mistake, state = await self._call(EXPERT_MISTAKE, [version, list(numbers), gauss])
        version, numbers, gauss = state
        rng.setstate((version, tuple(numbers), gauss))
        return mistake


class RemoteActionSpace:
    """The part of an environment's action space that a random policy uses."""

    def __init__(self, call: CallSession) -> None:
        self._call = call
        self._seed: int | None = None

    def seed(self, seed: int) -> None:
        """Set the seed of the next samples."""
        self._seed = seed

    async def sample(self) -> str:
        """Draw a random action."""
        seed, self._seed = self._seed, None
        return await self._call(SAMPLE, seed)


@dataclass(slots=True)
class RemoteTasks:
    """Tasks of one split of a served environment, which are cached; an `agentrl.task.RemoteTaskSource`.

    A task that was not fetched is requested with a blocking call: alone, or together with the following tasks if its
    predecessor is cached.

    Requests to an unreachable server are retried for `patience_s` seconds.

    Raises:
        UsageError: the split does not exist, or its data is missing.
        EnvironmentFailure: the server is unreachable or does not answer.
    """

    url: str
    split: str
    links: Links
    patience_s: float = ENVIRONMENT_PATIENCE_S
    _size: int = field(init=False)
    _rows: dict[int, dict[str, Any]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._size = self._ask_blocking(0, TASKS_PER_PAGE)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self._size:
            raise IndexError(index)
        if index not in self._rows:
            self._ask_blocking(index, TASKS_PER_PAGE if index - 1 in self._rows else 1)
        return read_task(self._rows[index], self.url)

    def holds(self, index: int) -> bool:
        """Return True if a task was fetched."""
        return index in self._rows

    async def fetch(self, indices: Sequence[int]) -> None:
        """Fetch the tasks of some indices; consecutive ones in one request."""
        runs: list[list[int]] = []
        """First index and number of consecutive tasks."""
        for index in sorted({index for index in indices if index not in self._rows}):
            if runs and index == sum(runs[-1]) and runs[-1][1] < TASKS_PER_PAGE:
                runs[-1][1] += 1
            else:
                runs.append([index, 1])
        slots, link = asyncio.Semaphore(CONCURRENT_FETCHES), self.links.borrow()

        async def ask(start: int, count: int) -> None:
            async with slots:
                route = self._route(start, count)
                self._keep(start, count, await link.ask("GET", route, patience_s=self.patience_s, answer_s=TASKS_S))

        try:
            async with asyncio.TaskGroup() as group:
                for start, count in runs:
                    group.create_task(ask(start, count))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        finally:
            await self.links.give_back()

    def _route(self, start: int, count: int) -> str:
        return f"{TASKS}/{quote(self.split, safe='')}?start={start}&count={count}"

    def _keep(self, start: int, count: int, answer: Any) -> int:
        """Keep the tasks of an answer and return the size of the split."""
        try:
            total, rows = int(answer["total"]), list(answer["tasks"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolMismatch(f"{self.url} did not send tasks", got=repr(answer)[:200]) from error
        if len(rows) != (expected := max(0, min(count, total - start))):
            what = f"{self.url} sent the wrong number of tasks of {self.split}, from index {start} of {total}"
            raise EnvironmentFailure(what, got=len(rows), expected=expected)
        self._rows.update(enumerate(rows, start))
        return total

    def _ask_blocking(self, start: int, count: int) -> int:
        route = self._route(start, count)
        return self._keep(start, count, ask_blocking(self.url, route, patience_s=self.patience_s, answer_s=TASKS_S))


class RemoteEnvironment(AsyncEnv):
    """One session of a server; the first reset opens it.

    It has only the optional parts of the served environment. A call that was abandoned (after a deadline or a lost
    connection) is retried before the next call, so that every call is executed exactly once.

    Requests to an unreachable or full server are retried for `patience_s` seconds.
    """

    def __init__(self, served: ServedEnvironment, links: Links, *, patience_s: float = ENVIRONMENT_PATIENCE_S) -> None:
        self.served = served
        self.action_hint = served.action_hint
        self._links = links
        self._link: Link | None = None
        self._patience_s = patience_s
        self._session: str | None = None
        self._number = 0
        self._pending: tuple[str, Mapping[str, Any]] | None = None
        """Name and body of the call that has no answer yet."""
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
        """Return an optional part of the served environment; methods call the server."""
        served: ServedEnvironment | None = self.__dict__.get("served")
        if served is None or name not in served.parts & OPTIONAL_PARTS:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        own = self._own_parts.get(name)
        return functools.partial(self._call, METHODS[name]) if own is None else own()

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Start an episode, in a new session if the server has closed the old one.

        Raises:
            EnvironmentFailure: the server or its environment failed.
            UsageError: the environment or the server rejected the options.
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
        """End the session; if the server is unreachable, the session's lease ends it."""
        session, self._session = self._session, None
        if self._link is None:
            return
        if session is not None:
            with contextlib.suppress(AgentRLError, TimeoutError):
                async with asyncio.timeout(ENVIRONMENT_CLOSE_S):
                    await self._link.ask("DELETE", f"{SESSIONS}/{session}", patience_s=0.0)
        self._link = None
        await self._links.give_back()

    async def _open_session(self) -> None:
        if self._link is None:
            self._link = self._links.borrow()
        session = secrets.token_hex(16)
        self._number, self._pending, self._session = 0, None, session
        body = {"fingerprint": self.served.fingerprint}
        await self._link.ask("PUT", f"{SESSIONS}/{session}", body, patience_s=self._patience_s, answer_s=None)

    async def _call(self, method: EnvMethod[P, R], *arguments: P.args, **_: P.kwargs) -> R:
        """Call a method in the session after all earlier calls."""
        async with self._turn:
            if self._session is None:
                raise EnvironmentFailure(f"{method.name} of {self.served.url} was called before reset")
            if self._pending is not None:
                with contextlib.suppress(_ErrorAnswer):
                    await self._send(*self._pending)
            body = {"number": self._number + 1, **method.write_arguments(*arguments)}
            _check_size(method, body, self.served.url)
            self._number += 1
            self._pending = method.name, body
            try:
                return method.result.read(await self._send(*self._pending))
            except _ErrorAnswer as answer:
                raise answer.error from answer.error.__cause__

    async def _send(self, method: str, body: Mapping[str, Any]) -> Any:
        """Send a numbered call; it stays pending until the server answers with a result or an error."""
        assert self._link is not None
        route = f"{SESSIONS}/{self._session}/{method}"
        self._state_key = None
        try:
            answer = await self._link.ask("POST", route, body, patience_s=self._patience_s, answer_s=None)
        except (SessionLost, RequestTimeout):
            raise
        except AgentRLError as error:
            self._pending = None
            raise _ErrorAnswer(error) from error
        self._pending = None
        self._state_key = answer.get("state_key")
        return answer

    async def _read_state_key(self) -> str:
        """Return the state key of the last answer, or request it if the answer had none."""
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


class _ErrorAnswer(Exception):
    """Error answer of the server, after which no call is pending."""

    def __init__(self, error: AgentRLError) -> None:
        super().__init__(str(error))
        self.error = error


class RemoteEnvironmentFactory:
    """Factory of remote environments that share connections; it can be pickled for worker processes."""

    def __init__(self, served: ServedEnvironment) -> None:
        self.served = served
        self.links = Links(served.url)

    def __call__(self, *, patience_s: float = ENVIRONMENT_PATIENCE_S) -> RemoteEnvironment:
        """Make an environment; its reset opens a session."""
        return RemoteEnvironment(self.served, self.links, patience_s=patience_s)

    def __reduce__(self) -> tuple[type[RemoteEnvironmentFactory], tuple[ServedEnvironment]]:
        return RemoteEnvironmentFactory, (self.served,)


def _check_size(method: EnvMethod[..., Any], body: Mapping[str, Any], url: str) -> None:
    """Reject a request that is too large for the server, before it gets a number."""
    if (size := len(to_json(body))) > (most := method.largest_request):
        raise UsageError(f"the request is too large for {url}", got=f"{size} bytes", expected=f"at most {most}")


def remote_spec(url: str) -> EnvironmentSpec:
    """Return the spec of the environment that is served at `url`; its name is the URL.

    Raises:
        UsageError: no environment server of this version answers at `url`, or the token is wrong.
    """
    _check_version(url, _ask(url, HEALTH))
    factory = RemoteEnvironmentFactory(read_served(url, _ask(url, INFO)))
    return EnvironmentSpec(
        name=url,
        make=factory,
        tasks=functools.partial(RemoteTasks, url, links=factory.links),
        isolation=Isolation.INLINE,
        options=OPTIONS,
        **spec_facts(factory.served),
    )


def _ask(url: str, route: str) -> Any:
    try:
        return ask_blocking(url, route, patience_s=0.0, answer_s=FIRST_ANSWER_S)
    except RequestTimeout as error:
        hint = error.hint or "start one: agentrl env serve NAME --port PORT"
        raise UsageError(f"no environment server answers at {url}", got=error.got, hint=hint) from error
    except ProtocolMismatch as error:
        raise _no_server_error(url, error.got) from error


def _check_version(url: str, health: Any) -> None:
    if not isinstance(health, dict) or health.get("protocol") != PROTOCOL:
        raise _no_server_error(url, repr(health)[:200])
    if VERSION not in health.get("versions", ()):
        raise UsageError(
            f"the environment server {url} has a different protocol version",
            got=", ".join(map(str, health.get("versions", ()))) or "none",
            expected=VERSION,
            hint="install the same version of agentrl on both sides",
        )


def _no_server_error(url: str, got: object) -> UsageError:
    return UsageError(
        f"no environment server found at {url}",
        got=got,
        expected="the URL that agentrl env serve prints, optionally followed by /SPLIT",
    )
