"""Environments behind OpenEnv servers (https://github.com/huggingface/OpenEnv, the package ``openenv`` 0.10).

This module implements the protocol of the package's generic client, so the package need not be installed. A WebSocket
is a session: ``{"type": "reset", "data": {…}}`` and ``{"type": "step", "data": ACTION}`` are answered by ``{"type":
"observation", "data": {"observation": {…}, "reward": …, "done": …}}`` or ``{"type": "error", "data": {"message": …,
"code": …}}``. Actions and observations are records whose fields each environment defines; here they become text. The
tools of a server, whose calls are actions of a type of their own, become tools. The servers do not recognize repeated
requests, so a lost connection ends the episode.
"""

from __future__ import annotations

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

from .served_tools import ServedTool

BAD_ACTION = "VALIDATION_ERROR"
"""Code of the error that answers an action without the required fields."""
LARGEST_MESSAGE = 100 * 2**20
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
        self._socket: aiohttp.ClientWebSocketResponse | None = None
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
        message = {"seed": seed, **(options or {})}
        had_connection = self._socket is not None
        try:
            answer = await self._ask("reset", message)
        except EnvironmentFailure:
            if not had_connection or self._socket is not None:
                raise
            answer = await self._ask("reset", message)  # servers close sessions that wait for long, as during training
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
                str(one["name"]),
                one.get("description"),
                one.get("input_schema") or one.get("inputSchema"),
                self._call_tool,
            )
            for one in described
        ]

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        answer = await self._ask("step", {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)})
        if answer["type"] == "error":
            raise ToolError(f"invalid call of {name}: {answer['data'].get('message')}")
        data = answer["data"]
        observation = data["observation"]
        if error := observation.get("error"):
            if error.get("error_type") == "transport_error":
                raise EnvironmentFailure(f"the tool {name} of {self._url} failed", got=error.get("message"))
            raise ToolError(f"{name}: {error.get('message')}")
        reward, self._steps = float(data["reward"] or 0.0), self._steps + 1
        self._total += reward
        is_over = bool(data["done"]) or self._steps >= self._max_steps
        return ToolResult(tool_value(observation.get("result")), reward=reward, stop=is_over)

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
            return text, 0.0, False, self._steps >= self._max_steps, {"valid": False, "success": False}
        data = answer["data"]
        reward, done = float(data["reward"] or 0.0), bool(data["done"])
        self._total += reward
        self._shown = self._text(data["observation"])
        info = {"valid": True, "success": done and self._total >= self._success_from}
        return self._shown, reward, done, self._steps >= self._max_steps and not done, info

    async def close(self) -> None:
        """End the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()
        http, self._http = self._http, None
        if http is not None:
            await http.close()

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
            socket = self._socket or await self._connect()
            await socket.send_json({"type": kind, "data": data})
            answer: dict[str, Any] = await socket.receive_json()
            refused = answer["data"].get("code") if answer["type"] == "error" else None
        except (aiohttp.ClientError, OSError, ValueError, TypeError, KeyError) as error:
            lost, self._socket = self._socket, None
            if lost is not None:
                await lost.close()
            raise EnvironmentFailure(f"{what} failed", got=f"{type(error).__name__}: {error}") from error
        if refused is not None and not (kind == "step" and refused == BAD_ACTION):
            raise EnvironmentFailure(f"{what} failed", got=f"{refused}: {answer['data'].get('message')}")
        return answer

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=LARGEST_MESSAGE)
        return self._socket


def tool_value(result: Any) -> str | list[str | ImagePart]:
    """Return the result of a tool call for the policy: the texts and images of an MCP result, a text, or else JSON."""
    content = result.get("content") if isinstance(result, dict) else None
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
