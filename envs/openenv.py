"""Environments behind OpenEnv servers (https://github.com/huggingface/OpenEnv, the package ``openenv`` 0.10).

This module implements the protocol of the package's generic client, so the package need not be installed. A WebSocket
is a session: ``{"type": "reset", "data": {…}}`` and ``{"type": "step", "data": ACTION}`` are answered by ``{"type":
"observation", "data": {"observation": {…}, "reward": …, "done": …}}`` or ``{"type": "error", "data": {"message": …,
"code": …}}``. Actions and observations are records whose fields each environment defines; here they become text. The
tools of a server, whose calls are actions of a type of their own, become tools. The servers do not recognize repeated
requests, so a lost connection ends the episode.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp

from agentrl.env import AsyncEnv, EnvironmentSpec, Isolation
from agentrl.errors import EnvironmentFailure, ToolError, UsageError
from agentrl.message import ImagePart
from agentrl.task import SeedTasks, seed_tasks
from agentrl.tool import Tool, ToolResult
from agentrl.tool.results import as_text

from .served_tools import ServedTool

BAD_ACTION = "VALIDATION_ERROR"
"""Code of the error that answers an action without the required fields."""
FULL = "CAPACITY_REACHED"
"""Code of the error that answers a connection too many."""
MAX_MESSAGE_BYTES = 100 * 2**20
"""Maximum bytes of a message, as in the package's client: observations may contain pictures."""


class OpenEnvironment(AsyncEnv):
    """One session of an OpenEnv server.

    An action is a JSON object with the fields of the environment's action; with `action_field`, any other text is the
    value of this field.

    Args:
        url: The server's address.
        action_field: Field of the action that receives the policy's text.
        observation_field: Field of the observation that the policy sees; by default, the whole observation as JSON.
        max_steps: Number of steps after which an episode is truncated.
        success_from: Minimum return of a finished episode that counts as solved.
        has_tools: Offer the server's tools to the policy, which calls them instead of writing actions.

    Raises:
        UsageError: the address is missing.
    """

    def __init__(
        self,
        *,
        url: str | None = None,
        action_field: str | None = None,
        observation_field: str | None = None,
        max_steps: int = 50,
        success_from: float = 1.0,
        has_tools: bool = False,
    ) -> None:
        if url is None:
            raise UsageError(
                "the OpenEnv server is not set", hint="set environment.options={url: http://127.0.0.1:8000}"
            )
        self._url = url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None
        self._connection: _Connection | None = None
        self._action_field, self._observation_field = action_field, observation_field
        self._max_steps, self._success_from = max_steps, success_from
        self._steps, self._total, self._shown = 0, 0.0, ""
        self._has_tools = has_tools
        self.tools: Sequence[Tool] = ()
        self.action_hint = "" if action_field else "a JSON object with the fields of the action"

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode; the seed and the options go to the server, which may ignore them.

        Raises:
            EnvironmentFailure: the server is lost, or failed.
            UsageError: the observations do not have the chosen field.
        """
        message, had_connection = {"seed": seed, **(options or {})}, self._connection is not None
        if self._connection is not None and not self._connection.is_usable:
            await self._disconnect()
        try:
            answer = await self._ask("reset", message)
        except EnvironmentFailure:
            if not had_connection or self._connection is None or self._connection.is_usable:
                raise
            await self._disconnect()  # servers close sessions that wait for long, as during training
            answer = await self._ask("reset", message)
        self._steps, self._total, self._shown = 0, 0.0, self._text(answer["data"]["observation"])
        if self._has_tools:
            self.tools = await self._list_tools()
        return self._shown, {}

    async def _list_tools(self) -> list[Tool]:
        answer = await self._ask("step", {"type": "list_tools"})
        described = [] if answer["type"] == "error" else answer["data"]["observation"].get("tools")
        if not described:
            raise UsageError(f"the OpenEnv server {self._url} has no tools", hint="remove the option has_tools")
        return [
            ServedTool(
                one.get("name"),
                one.get("description"),
                one.get("input_schema") or one.get("inputSchema"),
                self._call_tool,
            )
            for one in described
        ]

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        answer = await self._ask("step", {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)})
        self._steps += 1
        data = answer["data"]
        reward, is_done, error = 0.0, False, data
        if answer["type"] == "observation":
            seen = data["observation"]
            reward, is_done = _reward(data), bool(data.get("done"))
            error = seen.get("error") or _error_in(seen.get("result"))
        self._total += reward
        is_over = is_done or self._steps >= self._max_steps
        if error:
            message, kind = (
                (error.get("message"), error.get("error_type")) if isinstance(error, dict) else (error, None)
            )
            if kind == "transport_error":
                raise EnvironmentFailure(f"the tool {name} of {self._url} failed", got=message)
            if not is_over and not reward:
                raise ToolError(f"{name}: {message}")
            value: Any = f"{name}: {message}"
        else:
            value = tool_value(data["observation"].get("result"))
        success = self._is_solved(is_done) if is_over else None
        return ToolResult(value, reward=reward, stop=is_done, truncated=is_over and not is_done, success=success)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take an action.

        Raises:
            EnvironmentFailure: the server is lost, or failed.
        """
        self._steps += 1
        fields = self._fields(action)
        answer = None if fields is None else await self._ask("step", fields)
        if answer is None or answer["type"] == "error":
            wanted = self.action_hint or "what the environment asks for"
            text = f"That is not an action, so nothing happened. Answer with {wanted}.\n{self._shown}"
            return text, 0.0, False, self._steps >= self._max_steps, self._info(is_valid=False)
        data = answer["data"]
        reward, done = _reward(data), bool(data.get("done"))
        self._total += reward
        self._shown = self._text(data["observation"])
        info = self._info(is_valid=True, is_done=done)
        return self._shown, reward, done, self._steps >= self._max_steps and not done, info

    def _info(self, *, is_valid: bool, is_done: bool = False) -> dict[str, Any]:
        if self._has_tools and not is_done:  # a tool call may still end the episode
            return {"valid": is_valid}
        return {"valid": is_valid, "success": self._is_solved(is_done)}

    def _is_solved(self, is_done: bool) -> bool:
        return is_done and self._total >= self._success_from

    async def close(self) -> None:
        """End the session."""
        await self._disconnect()
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def _fields(self, action: str) -> dict[str, Any] | None:
        try:
            parsed = json.loads(action)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            return parsed
        return None if self._action_field is None else {self._action_field: action}

    def _text(self, observation: Mapping[str, Any]) -> str:
        name = self._observation_field
        if name is None:
            return json.dumps(observation, ensure_ascii=False)
        if name not in observation:
            expected = f"observation_field to be one of {', '.join(observation)}"
            raise UsageError(f"observations of {self._url} have no such field", got=name, expected=expected)
        return str(observation[name])

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer: an observation, or the error that an action is not valid."""
        what = f"{kind} of the OpenEnv server {self._url}"
        try:
            connection = self._connection or await self._connect()
            answer = read_answer(await connection.ask({"type": kind, "data": data}))
        except (aiohttp.ClientError, OSError, ValueError, TypeError) as error:
            raise EnvironmentFailure(f"{what} failed", got=f"{type(error).__name__}: {error}") from error
        refused = answer["data"].get("code") if answer["type"] == "error" else None
        if refused is not None and not (kind == "step" and refused == BAD_ACTION):
            hint = "lower environment.max_concurrent to the sessions of the server" if refused == FULL else ""
            raise EnvironmentFailure(f"{what} failed", got=f"{refused}: {answer['data'].get('message')}", hint=hint)
        return answer

    async def _connect(self) -> _Connection:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self._connection = _Connection(await self._http.ws_connect(f"{self._url}/ws", max_msg_size=MAX_MESSAGE_BYTES))
        return self._connection


class _Connection:
    """A WebSocket that receives in the background, because pings must be answered while the policy samples a turn."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._received: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue(1)
        self._receiving = asyncio.create_task(self._receive())
        self._is_answered = True

    @property
    def is_usable(self) -> bool:
        """True if it is open and every answer was awaited: an unread answer would be taken for the next one."""
        return self._is_answered and not self._socket.closed

    async def ask(self, message: Mapping[str, Any]) -> str:
        """Send a message and return the text of the answer.

        Raises:
            OSError: the connection is lost, or the answer to an earlier message was not awaited.
        """
        if not self._is_answered:
            raise ConnectionError("an earlier answer is missing; it came too late, or the connection was lost")
        self._is_answered = False
        with suppress(ConnectionError):  # messages that the server sent before it closed the connection give the reason
            await self._socket.send_json(message)
        answer = await self._received.get()
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the server closed the connection ({answer.data or answer.type.name})")
        self._is_answered = True
        return str(answer.data)

    async def close(self) -> None:
        self._receiving.cancel()
        await asyncio.wait({self._receiving})
        await self._socket.close()

    async def _receive(self) -> None:
        is_open = True
        while is_open:
            message = await self._socket.receive()
            is_open = message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY)
            await self._received.put(message)


def read_answer(text: str) -> dict[str, Any]:
    """Read an answer of a server: an observation or an error.

    Raises:
        ValueError: it is neither.
    """
    answer = json.loads(text)
    match answer:
        case {"type": "observation", "data": {"observation": dict(), **rest}}:
            numbers = isinstance(rest.get("reward"), int | float | None)
            if numbers and isinstance(rest.get("done"), bool | None):
                return dict(answer)
        case {"type": "error", "data": {"code": str()}}:
            return dict(answer)
    raise ValueError(f"{text[:200]} is neither an observation nor an error")


def _reward(data: Mapping[str, Any]) -> float:
    return float(data.get("reward") or 0.0)


def _error_in(result: Any) -> str:
    """Return a tool's own error message, which is in its MCP result; empty if it did not fail."""
    is_error = isinstance(result, dict) and (result.get("is_error") is True or result.get("isError") is True)
    return as_text(tool_value(result)) or "the tool failed" if is_error else ""


def tool_value(result: Any) -> str | list[str | ImagePart]:
    """Return the result of a tool call for the policy: the texts and images of an MCP result, a text, or else JSON.

    Structured content replaces empty content.
    """
    content = result.get("content") if isinstance(result, dict) else None
    if content == []:
        found = next((result[key] for key in ("structured_content", "structuredContent") if result.get(key)), None)
        return "" if found is None else json.dumps(found, ensure_ascii=False)
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        with suppress(KeyError, TypeError, ValueError):
            parts = [_block(part) for part in content]
            return parts if any(isinstance(part, ImagePart) for part in parts) else "\n".join(map(str, parts))
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _block(part: Mapping[str, Any]) -> str | ImagePart:
    if part.get("type") == "image":
        return ImagePart(
            data=base64.b64decode("".join(part["data"].split()), validate=True), media_type=part["mimeType"]
        )
    return str(part["text"])


def tasks(split: str, **_options: Any) -> SeedTasks:
    """Return tasks that differ in the seed that a reset sends."""
    return seed_tasks("openenv", split)


SPEC = EnvironmentSpec(
    name="openenv",
    make=OpenEnvironment,
    tasks=tasks,
    splits=SeedTasks.SPLITS,
    description="Environments of OpenEnv servers. Options: url (required), action_field or has_tools. Tasks are seeds.",
    success_threshold=1.0,
    instructions=(
        "You act in an environment. Each turn, write one action. The environment replies with an observation."
    ),
    isolation=Isolation.INLINE,
)
