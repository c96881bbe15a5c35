"""The environment that plays a served one: it has the parts that the other has, and they do what they do there.

- The expert and the action space of a served environment.
- A tool of an environment that lives elsewhere: in a worker process, or behind a server.
- The tasks of a served environment, fetched page by page when they are first asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias
from urllib.parse import quote

from agentrl.env import AsyncEnv
from agentrl.errors import AgentRLError, EnvironmentFailure, UsageError
from agentrl.message import Content, Message
from agentrl.remote.link import Link, Links, SessionLost, Unanswered, ask_now
from agentrl.remote.wire import (
    SESSIONS,
    TASKS,
    TASKS_PER_PAGE,
    EnvMethod,
    Served,
    largest_request,
    read_content,
    read_message,
    read_task,
    read_tool_result,
    to_json,
    write_content,
)
from agentrl.task import Task
from agentrl.tool import (
    Provisions,
    Tool,
    ToolResult,
    ToolRules,
)


class CallSession(Protocol):
    """Asks a session of the server for something."""

    def __call__(self, method: str, **arguments: Any) -> Awaitable[Any]:
        """Ask, and get the answer's JSON."""


class RemoteExpert:
    """The expert that the environment made over there.

    Args:
        call: Asks the session.
    """

    def __init__(self, call: CallSession) -> None:
        self._call = call

    async def act(self, observation: Content) -> str:
        """The next action, given the observation that followed the last one."""
        return str((await self._call("expert_action", observation=write_content(observation)))["action"])


class RemoteFallibleExpert(RemoteExpert):
    """One that can make mistakes."""

    async def mistake(self, rng: random.Random) -> str | None:
        """A mistake in place of the last action, drawn with `rng` as here: its state goes there and back."""
        version, numbers, gauss = rng.getstate()
        answer = await self._call("expert_mistake", random_state=[version, list(numbers), gauss])
        version, numbers, gauss = answer["random_state"]
        rng.setstate((version, tuple(numbers), gauss))
        mistake: str | None = answer["action"]
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
        """Decides what the next samples are."""
        self._seed = seed

    async def sample(self) -> str:
        """A random action."""
        seed, self._seed = self._seed, None
        return str((await self._call("sample", seed=seed))["action"])


CallTool: TypeAlias = Callable[[str, Mapping[str, Any]], Awaitable[ToolResult]]


class RemoteTool(Tool):
    """Has a tool's name and schema here, and its function elsewhere.

    Args:
        name: Name that the policy uses.
        schema: The description that was made where the function is.
        stop: A call ends the episode.
        rules: How calls are carried out, where it is not the default.
        remote: Calls it; ``None`` leaves that to who receives the tool.
    """

    def __init__(
        self,
        name: str,
        schema: dict[str, Any],
        stop: bool = False,
        rules: Mapping[str, Any] = MappingProxyType({}),
        remote: CallTool | None = None,
    ) -> None:
        self.name = name
        known = {rule.name for rule in dataclasses.fields(ToolRules)}  # a newer server may know more
        self.rules = ToolRules(**{name: value for name, value in rules.items() if name in known} | {"stop": stop})
        self.options = {}
        self.schema = schema
        self.remote = remote

    def to_plain(self) -> dict[str, Any]:
        """The description as JSON types: keyword arguments of this class."""
        rules = self.rules.changed()
        stop = bool(rules.pop("stop", False))
        return {"name": self.name, "schema": self.schema, "stop": stop, **({"rules": rules} if rules else {})}

    @classmethod
    def describe(cls, tool: Tool) -> RemoteTool:
        """The remote form of a tool, made where the tool is."""
        rules = {name: value for name, value in tool.rules.changed().items() if name not in ("stop", "inline")}
        return cls(tool.name, tool.schema, tool.stop, rules)

    @property
    def is_stateful(self) -> bool:
        """Its state is the environment's."""
        return False

    @property
    def needs_sandbox(self) -> bool:
        """What it needs it has where it is."""
        return False

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as they are: they are checked where the function is."""
        return dict(arguments)

    async def open(self, stack: AsyncExitStack, provisions: Provisions | None = None) -> Callable[..., Any]:
        """Nothing to open: the environment owns it."""
        assert self.remote is not None
        return self.remote

    async def run(self, bound: Callable[..., Any], checked: Mapping[str, Any]) -> ToolResult:
        """Call the function where it is."""
        result: ToolResult = await bound(self.name, checked)
        return result


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


def remote_tasks(url: str, split: str, *, patience_s: float = PATIENCE_S) -> RemoteTasks:
    """`RemoteTasks` in the shape of a spec's task source."""
    return RemoteTasks(url, split, patience_s)


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
        self._tools: tuple[RemoteTool, ...] = ()
        self._space = RemoteActionSpace(self._call)
        self._parts: Mapping[EnvMethod, Callable[[], Any]] = {
            EnvMethod.STATE_KEY: lambda: self._read_state_key,
            EnvMethod.SNAPSHOT: lambda: self._snapshot,
            EnvMethod.RESTORE: lambda: self._restore,
            EnvMethod.EXPERT: lambda: self._begin_expert,
            EnvMethod.ADMISSIBLE_ACTIONS: lambda: functools.partial(self._value_of, "admissible_actions"),
            EnvMethod.WEB_PAGE: lambda: functools.partial(self._value_of, "web_page"),
            EnvMethod.TOOL_MESSAGE: lambda: self._tool_message,
            EnvMethod.TOOLS: lambda: self._tools,
            EnvMethod.ACTION_SPACE: lambda: self._space,
        }

    def __getattr__(self, name: str) -> Any:
        """A part of the served environment."""
        parts = self.__dict__.get("served")
        if parts is None or name not in parts.parts:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return self._parts[EnvMethod(name)]()

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Start an episode; in a new session where the old one was closed meanwhile.

        Raises:
            EnvironmentFailure: the server or its environment failed.
            UsageError: what the environment or the server refuses.
        """
        begin = functools.partial(self._call, "reset", seed=seed, options=options or {})
        if self._session is None:
            await self._open_session()
        try:
            answer = await begin()
        except SessionLost:
            await self._open_session()
            answer = await begin()
        self.action_hint = answer["action_hint"]
        self._tools = tuple(RemoteTool(**tool, remote=self._call_tool) for tool in answer["tools"])
        return read_content(answer["observation"]), answer["info"]

    async def step(self, action: str) -> tuple[Content, float, bool, bool, dict[str, Any]]:
        """Take an action.

        Raises:
            EnvironmentFailure: the server or its environment failed.
        """
        answer = await self._call("step", action=action)
        observation = read_content(answer["observation"])
        return observation, answer["reward"], answer["terminated"], answer["truncated"], answer["info"]

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

    async def _call(self, method: str, **arguments: Any) -> Any:
        """Ask the session for something, after what was asked before."""
        async with self._turn:
            if self._session is None:
                raise EnvironmentFailure(f"{method} of {self.served.url} comes before reset")
            if self._pending is not None:
                with contextlib.suppress(_Answered):
                    await self._send(*self._pending)
            body = {"number": self._number + 1, **arguments}
            _check_size(method, body, self.served.url)
            self._number += 1
            self._pending = method, body
            try:
                return await self._send(*self._pending)
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

    async def _value_of(self, method: str) -> Any:
        return (await self._call(method))["value"]

    async def _read_state_key(self) -> str:
        """The key that came with the last answer; asked for where none did."""
        return self._state_key if self._state_key is not None else str((await self._call("state_key"))["state_key"])

    async def _snapshot(self) -> Any:
        return await self._value_of("snapshot")

    async def _restore(self, data: Any) -> None:
        if self._session is None:
            await self._open_session()
        await self._call("restore", data=data)

    async def _begin_expert(self) -> RemoteExpert:
        is_fallible = (await self._call("expert"))["is_fallible"]
        return (RemoteFallibleExpert if is_fallible else RemoteExpert)(self._call)

    async def _tool_message(self, action: str) -> Message:
        return read_message((await self._call("tool_message", action=action))["message"])

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        answer = await self._call("call_tool", name=name, arguments=dict(arguments))
        return read_tool_result(answer).checked(name)


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


def _check_size(method: str, body: Mapping[str, Any], url: str) -> None:
    """Refuse what the server would refuse, before it counts as a call."""
    if (size := len(to_json(body))) > (most := largest_request(method)):
        raise UsageError(f"this is too much for {url}", got=f"{size} bytes", expected=f"at most {most}")
