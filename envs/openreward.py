"""Environments behind servers of the Open Reward Standard (https://docs.openreward.ai, the package ``openreward`` 0.1).

This module implements the protocol, so the package need not be installed. A session is a header, ``X-Session-ID``;
``POST /create`` gives it a task, ``GET /NAME/prompt`` returns the task's text, ``GET /NAME/task_tools`` its tools, and
``POST /NAME/call`` streams the result of a call as server-sent events: ``chunk``s and an ``end``, whose data together
are ``{"ok": true, "output": {"blocks": […], "reward": …, "finished": …}}`` or ``{"ok": false, "error": …}``.

Agents act by tools only. One may be hidden: it receives the text of an answer without calls, and ends the episode.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp

from agentrl.env import AsyncEnv, EnvironmentSpec, Isolation
from agentrl.errors import EnvironmentFailure, ToolError, UsageError
from agentrl.message import Content, ContentPart, ImagePart, TextPart, text_of
from agentrl.task import Task
from agentrl.tool import Tool, ToolResult

from .served_tools import ServedTool

T = TypeVar("T")
ASK_S = 30.0
"""Seconds for a question about splits and tasks."""
STARTING_S = 2.0
"""Seconds between two questions for the prompt of an environment that is still starting."""
LEAVE_S = 5.0
"""Seconds for the end of a session."""
HINT = "set environment.options={url: http://127.0.0.1:8080}"
CALL_A_TOOL = "Nothing happened. To act in this environment, call one of its tools."


class OpenRewardEnvironment(AsyncEnv):
    """Sessions of a server, one per episode.

    Args:
        url: The server's address.
        name: Name of the environment on the server (default: its first one).
        max_steps: Number of tool calls and text answers after which an episode is truncated.
        success_from: Minimum return of a finished episode that counts as solved.

    Raises:
        UsageError: the address is missing.
    """

    def __init__(
        self, *, url: str | None = None, name: str | None = None, max_steps: int = 50, success_from: float = 1.0
    ) -> None:
        self._url = checked_url(url)
        self._name = name
        self._max_steps, self._success_from = max_steps, success_from
        self._http: aiohttp.ClientSession | None = None
        self._session: str | None = None
        self._terminal: Mapping[str, Any] | None = None
        self._steps, self._total = 0, 0.0
        self.tools: Sequence[Tool] = ()

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Content, dict[str, Any]]:
        """Start the task of the options ``split`` and ``index``; without them, a task of the split ``train``.

        Raises:
            EnvironmentFailure: the server is lost, or failed.
        """
        await self._leave()
        if self._name is None:
            self._name = str((await self._ask("GET", "/list_environments"))[0])
        self._session = await self._open()
        task = {"split": "train", "index": seed or 0, **(options or {})}
        await self._ask("POST", "/create", {"env_name": self._name, **task})
        prompt = read_blocks(await self._prompt())
        listed = await self._ask("GET", f"/{self._name}/task_tools")
        self._terminal = listed.get("terminal_tool")
        self.tools = [
            ServedTool(one.get("name"), one.get("description"), one.get("input_schema"), self._call_tool)
            for one in listed["tools"]
        ]
        self._steps, self._total = 0, 0.0
        return prompt, {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Give the text of an answer to the hidden tool; without one, nothing happens.

        Raises:
            EnvironmentFailure: the server is lost, or failed.
        """
        if self._terminal is None:
            self._steps += 1  # no success yet: a call may still end the episode
            return CALL_A_TOOL, 0.0, False, self._steps >= self._max_steps, {"valid": False}
        field = self._terminal.get("arg")
        try:
            result = await self._call(self._terminal["name"], {} if field is None else {field: action})
        except ToolError as error:
            return str(error), 0.0, True, False, {"valid": False, "success": False}
        info = {"valid": True, "success": self._total >= self._success_from}
        return str(result.text), result.reward, True, False, info

    async def close(self) -> None:
        """End the session."""
        await self._leave()
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _leave(self) -> None:
        session, self._session = self._session, None
        if session is None or self._http is None:
            return
        with suppress(aiohttp.ClientError, OSError):  # nothing depends on the server's clean-up
            for route in ("/delete", "/delete_session"):
                timeout, headers = aiohttp.ClientTimeout(LEAVE_S), {"X-Session-ID": session}
                async with self._http.post(self._url + route, timeout=timeout, headers=headers):
                    pass

    async def _open(self) -> str:
        events = await self._stream("/create_session", {})
        found = [event.data for event in events if event.name == "task_id"]
        if not found:
            raise EnvironmentFailure(f"the server {self._url} did not open a session", got=str(events)[:200])
        return found[0]

    async def _prompt(self) -> list[Any]:
        """Return the blocks of the prompt, as soon as the environment has started; the reset has a deadline."""
        while True:
            answer = await self._ask("GET", f"/{self._name}/prompt", is_patient=True)
            if answer is not None:
                return list(answer)
            await asyncio.sleep(STARTING_S)

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool for the policy; its last allowed step ends the episode, even if the call is wrong."""
        try:
            result = await self._call(name, arguments)
        except ToolError as error:
            if self._steps < self._max_steps:
                raise
            result = ToolResult(str(error))
        if result.stop:
            return replace(result, success=self._total >= self._success_from)
        is_late = self._steps >= self._max_steps
        return replace(result, truncated=is_late, success=False if is_late else None)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool.

        Raises:
            ToolError: the call is wrong; the policy reads why.
            EnvironmentFailure: the server is lost, or the tool failed.
        """
        events = await self._stream(f"/{self._name}/call", {"name": name, "input": dict(arguments)})
        if not events or events[-1].name != "end":
            got = events[-1].data[:300] if events else "nothing"
            raise EnvironmentFailure(f"tool {name} of the server {self._url} failed", got=got)
        try:
            answer = json.loads("".join(event.data for event in events if event.name in ("chunk", "end")))
            self._steps += 1
            if not answer["ok"]:
                raise ToolError(f"{name}: {answer['error']}")
            output = answer["output"]
            reward, text = float(output.get("reward") or 0.0), text_of(read_blocks(output["blocks"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EnvironmentFailure(f"the result of tool {name} is not valid", got=repr(error)) from error
        self._total += reward
        return ToolResult(text, reward=reward, stop=bool(output.get("finished")))

    async def _ask(
        self, method: str, route: str, body: Mapping[str, Any] | None = None, *, is_patient: bool = False
    ) -> Any:
        """Send a request and return the answer; ``None`` if `is_patient` and the environment is still starting."""
        async with self._sent(method, route, body) as response:
            if is_patient and response.status == 503 and response.headers.get("X-Backend-State") == "starting":
                return None
            await self._check(response, route)
            return await response.json()

    async def _stream(self, route: str, body: Mapping[str, Any]) -> list[ServerSentEvent]:
        """Send a request and return the events of the answer."""
        async with self._sent("POST", route, body) as response:
            await self._check(response, route)
            return read_events(await response.text())

    def _sent(self, method: str, route: str, body: Mapping[str, Any] | None) -> _Sent:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        headers = {} if self._session is None else {"X-Session-ID": self._session}
        request = self._http.request(method, self._url + route, json=body, headers=headers)
        return _Sent(request, f"the connection to server {self._url} is lost ({route})")

    async def _check(self, response: aiohttp.ClientResponse, route: str) -> None:
        if response.status != 200:
            got = f"{response.status}: {(await response.text())[:300]}"
            raise EnvironmentFailure(f"the server {self._url} rejected {route}", got=got)


class _Sent:
    """A request whose transport errors are failures of the environment."""

    def __init__(self, request: Any, what: str) -> None:
        self._request, self._what = request, what

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response: aiohttp.ClientResponse = await self._request.__aenter__()
        except (aiohttp.ClientError, OSError) as error:
            raise self._failure(error) from error
        return response

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        await self._request.__aexit__(kind, error, traceback)
        if isinstance(error, aiohttp.ClientError | OSError | ValueError):
            raise self._failure(error) from error

    def _failure(self, error: BaseException) -> EnvironmentFailure:
        return EnvironmentFailure(self._what, got=f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event of a stream."""

    name: str
    data: str


def read_events(text: str) -> list[ServerSentEvent]:
    r"""Read server-sent events; comments, such as pings, are left out.

    >>> read_events(": ping\r\n\r\nevent: end\r\ndata: {\r\ndata: }\r\n\r\n")
    [ServerSentEvent(name='end', data='{\n}')]
    """
    events = []
    name, data = "message", list[str]()
    for line in [*text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), ""]:
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line and data:
            events.append(ServerSentEvent(name, "\n".join(data)))
            name, data = "message", []
        elif field == "event":
            name = value
        elif field == "data":
            data.append(value)
    return events


def read_blocks(blocks: Sequence[Mapping[str, Any]]) -> Content:
    """Read blocks of text and images: text if there are no images."""
    parts: list[ContentPart] = [
        ImagePart(data=base64.b64decode(block["data"]), media_type=block["mimeType"])
        if block["type"] == "image"
        else TextPart(text=block["text"])
        for block in blocks
    ]
    is_text = all(isinstance(part, TextPart) for part in parts)
    return "\n".join(text_of((part,)) for part in parts) if is_text else tuple(parts)


@dataclass(frozen=True, slots=True)
class OpenRewardTasks:
    """The tasks of a split of a server."""

    split: str
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise IndexError(index)
        options = {"split": self.split, "index": index}
        return Task(id=f"{self.split}-{index}", environment="openreward", seed=index, options=options)


def tasks(split: str, *, url: str | None = None, name: str | None = None, **_options: Any) -> OpenRewardTasks:
    """Return the tasks of the server's split with this name, or else of its first one of this type.

    Raises:
        UsageError: the address is missing, no server answers, or it has no such split.
    """
    address = checked_url(url)
    name = name or _question(address, "/list_environments", lambda names: str(names[0]))
    splits = _question(
        address, f"/{name}/splits", lambda splits: [(str(one["name"]), str(one["type"])) for one in splits]
    )
    found = [own for own, _ in splits if own == split] or [own for own, kind in splits if kind == split]
    if not found:
        got = ", ".join(f"{own} ({kind})" for own, kind in splits)
        raise UsageError(f"environment {name} of the server {address} has no split {split}", got=got or "no splits")
    route = f"/{name}/num_tasks"
    return OpenRewardTasks(
        found[0], _question(address, route, lambda answer: int(answer["num_tasks"]), {"split": found[0]})
    )


def checked_url(url: str | None) -> str:
    """Return an address without a slash at its end.

    Raises:
        UsageError: it is missing.
    """
    if url is None:
        raise UsageError("the address of the Open Reward Standard server is not set", hint=HINT)
    return url.rstrip("/")


def _question(url: str, route: str, read: Callable[[Any], T], body: Mapping[str, Any] | None = None) -> T:
    """Ask a server before a run; `read` takes the value from the JSON of the answer.

    Raises:
        UsageError: it does not answer, or not as a server of the standard does.
    """
    data, headers = (None, {}) if body is None else (json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(urllib.request.Request(url + route, data, headers), timeout=ASK_S) as answer:
            return read(json.loads(answer.read()))
    except (OSError, http.client.HTTPException, ValueError, TypeError, LookupError) as error:
        got = f"{type(error).__name__}: {error}"
        raise UsageError(f"no Open Reward Standard server responds at {url}{route}", got=got, hint=HINT) from error


SPEC = EnvironmentSpec(
    name="openreward",
    make=OpenRewardEnvironment,
    tasks=tasks,
    splits=("train", "validation", "test"),
    description="Environments of servers of the Open Reward Standard. Options: url (required), name.",
    tool_instructions="You solve a task by calling tools.",
    success_threshold=1.0,
    isolation=Isolation.INLINE,
)
