"""An environment behind the protocol of OpenEnv (https://github.com/huggingface/OpenEnv, package ``openenv`` 0.10).

A WebSocket at ``/ws`` is a session, or joins one that ``openenv/session/create`` opened at ``/mcp``. Message types are
``reset``, ``step``, ``state``, ``mcp`` and ``close``. An action is ``{"action": TEXT}``, or one of OpenEnv's tool
actions: ``{"type": "call_tool", "tool_name": …, "arguments": {…}}`` and ``{"type": "list_tools"}``. The routes
``/health``, ``/metadata``, ``/schema`` and those of tasks describe the environment.

Messages are read during a step, because a client closes a connection that does not answer its pings.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import WSMsgType, web

from agentrl.env import EnvironmentSpec
from agentrl.errors import AgentRLError, ToolError, UsageError
from agentrl.message import Content, text_of
from agentrl.remote.listening import DEEPEST, Listener, guard, is_deep, read_body
from agentrl.remote.server.episodes import EpisodeHost, ServedEpisode, TaskChoice, first_text
from agentrl.remote.server.server import ServerSettings, error_answers, respond
from agentrl.remote.server.session import Clock, Leases
from agentrl.remote.wire import (
    HEALTH,
    MAX_CALL_BYTES,
    Refusal,
    RefusalKind,
    field,
    to_json,
    whole_number,
    write_content,
)
from agentrl.task import Task
from agentrl.tool import Tool
from agentrl.tool.schema import WrongArguments

MAX_WAITING = 16
"""Maximum number of queued messages of a connection."""
MAX_TASKS = 10_000
"""Maximum number of tasks in one answer."""
_CHOICES = ("split", "index", "seed", "episode_id")
"""Allowed fields of a reset; the id of an episode is its session's id."""
_SPLIT_TYPES = {"train": "train", "test": "test"}
"""The protocol's split types; all other splits are reported as validation."""
RPC_CODES = {
    "parse": -32700,
    "request": -32600,
    "method": -32601,
    "params": -32602,
    "internal": -32603,
    "server": -32000,
}
"""Error codes of JSON-RPC."""
AN_ACTION = '{"action": TEXT} or {"type": "call_tool", "tool_name": NAME, "arguments": {…}}'


class OpenEnvServer:
    """Server of one environment; it belongs to one event loop. `options` override those of `spec`.

    Raises:
        UsageError: the environment has roles that a run plays.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        options: Mapping[str, Any],
        settings: ServerSettings,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.url = ""
        self.settings = settings
        self._host = EpisodeHost(spec, options, settings, starter="reset", clock=clock)
        self.sessions: Leases[ServedEpisode] = Leases(
            ("session", "sessions"), most=settings.max_sessions, lease_s=settings.lease_s
        )
        self._joined: set[str] = set()
        """Sessions with a connection."""
        self._listener: Listener | None = None

    async def start(self) -> None:
        """Make an environment to describe it, then listen.

        Raises:
            UsageError: the options are wrong, or the port is taken.
            EnvironmentFailure: the environment cannot be made.
        """
        await self._host.describe()
        application = web.Application(middlewares=[error_answers, guard(self.settings.token, self.settings.host)])
        application.add_routes(
            [
                web.get(HEALTH, self._health),
                web.get("/metadata", self._metadata),
                web.get("/schema", self._schema),
                web.get("/list_environments", self._names),
                web.get("/{name:.+}/splits", self._splits),
                web.post("/{name:.+}/{method:num_tasks|tasks|task_range|task}", self._tasks),
                web.get("/ws", self._connect),
                web.post("/mcp", self._answer_rpc),
            ]
        )
        self._listener = Listener(application, most_connections=self.settings.most_connections)
        self.url = await self._listener.start(self.settings.host, self.settings.port)
        self.sessions.start_expiring()

    async def close(self) -> None:
        """Stop listening, and close all sessions and environments; idempotent."""
        if self._listener is not None:
            await self._listener.close()
        await self.sessions.close()
        await self._host.close()

    async def _health(self, _request: web.Request) -> web.Response:
        return respond({"status": "healthy"})

    async def _metadata(self, _request: web.Request) -> web.Response:
        spec = self._host.spec
        return respond({"name": spec.name, "description": spec.description, "version": str(spec.version)})

    async def _schema(self, _request: web.Request) -> web.Response:
        return respond(SCHEMAS)

    async def _names(self, _request: web.Request) -> web.Response:
        return respond([self._host.spec.name])

    async def _splits(self, request: web.Request) -> web.Response:
        self._check_name(request)
        splits = self._host.spec.splits
        return respond([{"name": split, "type": _SPLIT_TYPES.get(split, "validation")} for split in splits])

    async def _tasks(self, request: web.Request) -> web.Response:
        self._check_name(request)
        _, body = await read_body(request, MAX_CALL_BYTES)
        split, method = field(body, "split", str), request.match_info["method"]
        size = len(self._host.tasks.source(split))
        if method == "num_tasks":
            return respond({"num_tasks": size})
        if method == "task":
            chosen = range(index := whole_number(body, "index", least=0, most=size - 1), index + 1)
        else:
            first, end = body.get("start"), body.get("stop")
            first = 0 if first is None else whole_number(body, "start", least=0, most=size)
            chosen = range(first, size if end is None else whole_number(body, "stop", least=0, most=size))
        if len(chosen) > MAX_TASKS:
            hint = "request a part of them with task_range"
            raise UsageError("too many tasks for one response", got=len(chosen), expected=MAX_TASKS, hint=hint)
        find = self._host.tasks.find
        found = [write_shown_task(await find(TaskChoice(split=split, index=i), default=0), i) for i in chosen]
        return respond({"task": found[0]} if method == "task" else {"tasks": found, "env_name": self._host.spec.name})

    def _check_name(self, request: web.Request) -> None:
        name = request.match_info["name"]
        if name.lower() != self._host.spec.name.lower():
            raise web.HTTPNotFound(reason=f"unknown environment {name[:80]}")

    async def _open(self) -> str:
        name = uuid.uuid4().hex

        async def begin() -> ServedEpisode:
            return self._host.open()

        await self.sessions.open(name, begin)
        return name

    async def _connect(self, request: web.Request) -> web.WebSocketResponse:
        """Serve a connection until it is closed."""
        socket = web.WebSocketResponse(max_msg_size=MAX_CALL_BYTES)
        await socket.prepare(request)
        with contextlib.suppress(ConnectionError):  # the client is gone
            try:
                async with self._session(request.query.get("session_id")) as name, _messages(socket) as messages:
                    while (text := await messages.get()) is not None:
                        if (answer := await self._answer(name, text)) is None:
                            break
                        await socket.send_str(answer)
            except WrongMessage as error:
                await socket.send_str(_dump(write_error(error.code, str(error))))
        await socket.close()
        return socket

    @asynccontextmanager
    async def _session(self, joined: str | None) -> AsyncIterator[str]:
        """Open a session for a connection, or join an open session without a connection."""
        try:
            name = joined or await self._open()
            self.sessions.find(name)
        except Refusal as error:
            code = "CAPACITY_REACHED" if error.kind is RefusalKind.BUSY else "SESSION_ERROR"
            raise WrongMessage(code, str(error)) from error
        if name in self._joined:
            raise WrongMessage("SESSION_ERROR", f"session {name} already has a connection")
        self._joined.add(name)
        try:
            yield name
        finally:
            self._joined.discard(name)
            if joined is None:
                self.sessions.end(name)

    async def _answer(self, name: str, text: str) -> str | None:
        """Return the answer to a message; ``None`` if it closes the session."""
        try:
            answer = await self._carry_out(name, read_object(text))
        except WrongMessage as error:
            answer = write_error(error.code, str(error))
        except Refusal as error:
            answer = write_error("SESSION_ERROR", str(error))
        except AgentRLError as error:
            answer = write_error("EXECUTION_ERROR", str(error))
        try:
            return None if answer is None else _dump(answer)
        except (TypeError, ValueError) as error:
            problem = f"the environment's result cannot be sent: {error}"
            return _dump(write_error("EXECUTION_ERROR", problem))

    async def _carry_out(self, name: str, message: Mapping[str, Any]) -> dict[str, Any] | None:
        kind, data = message.get("type"), message.get("data", {})
        if not isinstance(data, dict):
            raise WrongMessage("VALIDATION_ERROR", f"data of the message is {data!r:.80}, expected an object")
        if kind == "close":
            return None
        if kind == "mcp":
            return {"type": "mcp", "data": await self._rpc(data, name)}
        if kind not in ("state", "reset", "step"):
            expected = "expected reset, step, state, mcp or close"
            raise WrongMessage("UNKNOWN_TYPE", f"unknown message type {kind!r:.80}, {expected}")
        episode = self.sessions.find(name)
        if kind == "state":
            return {"type": "state", "data": write_state(episode, name)}
        observed = self._reset(episode, data) if kind == "reset" else self._step(episode, OpenEnvAction.read(data))
        return {"type": "observation", "data": await observed}

    async def _reset(self, episode: ServedEpisode, data: Mapping[str, Any]) -> dict[str, Any]:
        """Start the task that `data` chooses."""
        if unknown := sorted(data.keys() - set(_CHOICES)):
            problem = f"unknown fields of the reset: {', '.join(unknown)}, expected {', '.join(_CHOICES)}"
            raise WrongMessage("VALIDATION_ERROR", problem)
        split = data.get("split")
        if split is not None and not isinstance(split, str):
            raise WrongMessage("VALIDATION_ERROR", f"split is {split!r:.80}, expected a name")
        index, seed = whole_number_or_none(data, "index"), whole_number_or_none(data, "seed")
        result = await episode.start(TaskChoice(split=split, index=index, seed=seed))
        task, spec = episode.state.task, self._host.spec
        assert task is not None
        rules = {
            "instructions": spec.instructions,
            "tool_instructions": spec.tool_instructions,
            "action_hint": result.action_hint,
        }
        fields = {**write_shown(first_text(task, result.observation)), **rules}
        return write_observation(fields, 0.0, episode, result.info)

    async def _step(self, episode: ServedEpisode, action: OpenEnvAction) -> dict[str, Any]:
        if action.text is not None:
            result = await episode.step(action.text)
            return write_observation(write_shown(result.observation), result.reward, episode, result.info)
        if action.tool is not None:
            called = await call_for_observation(episode, action.tool, action.arguments)
            return write_observation(called.fields, called.reward, episode, called.metrics)
        return write_observation({"tools": self._tools(episode)}, None, episode, {})

    def _tools(self, episode: ServedEpisode | None) -> list[dict[str, Any]]:
        """Return the tools of an episode, or the environment's initial tools."""
        tools = [] if episode is None else list(episode.tools.values())
        return [write_tool(tool) for tool in tools or self._host.tools]

    async def _answer_rpc(self, request: web.Request) -> web.Response:
        """Answer a JSON-RPC request over HTTP."""
        try:
            _, body = await read_body(request, MAX_CALL_BYTES)
        except Refusal as error:
            return respond(write_rpc_error(None, "parse", str(error)))
        return respond(await self._rpc(body, None))

    async def _rpc(self, body: Mapping[str, Any], own: str | None) -> dict[str, Any]:
        """Answer a JSON-RPC request; `own` is the session of the connection over which it came."""
        number, method, given = body.get("id"), body.get("method"), body.get("params") or {}
        if body.get("jsonrpc") != "2.0" or not isinstance(method, str) or not isinstance(given, dict):
            return write_rpc_error(number, "request", "expected jsonrpc 2.0, a method and params")
        try:
            result = await self._run_rpc(method, given, own)
        except WrongMessage as error:
            return write_rpc_error(number, error.code, str(error))
        except Refusal as error:
            return write_rpc_error(number, "server" if error.kind is RefusalKind.BUSY else "params", str(error))
        except AgentRLError as error:
            return write_rpc_error(number, "internal", str(error))
        return {"jsonrpc": "2.0", "id": number, "result": result}

    async def _run_rpc(self, method: str, given: Mapping[str, Any], own: str | None) -> dict[str, Any]:
        if method == "openenv/session/create":
            return {"session_id": own or await self._open()}
        name = given.get("session_id") or own
        if method == "tools/list":
            return {"tools": self._tools(self.sessions.find(str(name)) if name else None)}
        if method not in ("tools/call", "openenv/session/close"):
            raise WrongMessage("method", f"unknown method {method[:80]!r}")
        if not isinstance(name, str):
            raise WrongMessage("params", f"{method} requires a session_id")
        episode = self.sessions.find(name)
        if method == "openenv/session/close":
            self.sessions.end(name)
            return {"session_id": name, "closed": True}
        tool, arguments = given.get("name"), given.get("arguments") or {}
        if not isinstance(tool, str) or not isinstance(arguments, dict):
            raise WrongMessage("params", "a tool call requires a name, and arguments as an object")
        called = await call_for_observation(episode, tool, arguments)
        if called.error is not None:
            code = "server" if called.error["error_type"] == "execution_error" else "params"
            raise WrongMessage(code, called.error["message"])
        state = {"reward": called.reward, "done": episode.state.is_over}
        return {**called.fields, "data": called.text, **state}


@asynccontextmanager
async def _messages(socket: web.WebSocketResponse) -> AsyncIterator[asyncio.Queue[str | None]]:
    """Receive a connection's messages in the background, so that pings are answered at once; ``None`` is its end."""
    queue: asyncio.Queue[str | None] = asyncio.Queue(MAX_WAITING)

    async def receive() -> None:
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await queue.put(message.data)
            elif message.type is WSMsgType.BINARY:
                await queue.put(message.data.decode(errors="replace"))
        await queue.put(None)

    receiving = asyncio.create_task(receive())
    try:
        yield queue
    finally:
        receiving.cancel()
        await asyncio.wait({receiving})


def _dump(answer: Mapping[str, Any]) -> str:
    return to_json(answer).decode()


class WrongMessage(Exception):
    """A message that the server answers with an error of this code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvAction:
    """Action of a step: a text or a tool call. Without either, the client requests the list of tools."""

    text: str | None = None
    tool: str | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> OpenEnvAction:
        """Read an action; OpenEnv's own clients may add ``metadata``, which is ignored.

        Raises:
            WrongMessage: it is not an action.
        """
        fields = {name: value for name, value in data.items() if name != "metadata"}
        text, tool, arguments = fields.get("action"), fields.get("tool_name"), fields.get("arguments", {})
        match fields.get("type"):
            case "list_tools" if fields.keys() == {"type"}:
                return cls()
            case "call_tool" if isinstance(tool, str) and isinstance(arguments, dict):
                return cls(tool=tool, arguments=arguments)
            case None if isinstance(text, str) and fields.keys() == {"action"}:
                return cls(text=text)
        raise WrongMessage("VALIDATION_ERROR", f"not an action: got {json.dumps(fields)[:200]}, expected {AN_ACTION}")


def read_object(text: str) -> dict[str, Any]:
    """Read the JSON object of a message.

    Raises:
        WrongMessage: it is not a JSON object.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongMessage("INVALID_JSON", f"the message is not valid JSON: {error}") from error
    if not isinstance(message, dict):
        raise WrongMessage("VALIDATION_ERROR", f"the message is {text[:80]!r}, expected an object")
    if is_deep(message):
        raise WrongMessage("VALIDATION_ERROR", f"the message has more than {DEEPEST} levels of lists and objects")
    return message


def whole_number_or_none(data: Mapping[str, Any], name: str) -> int | None:
    """Read an optional whole number.

    Raises:
        WrongMessage: it is not a whole number.
    """
    value = data.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise WrongMessage("VALIDATION_ERROR", f"{name} is {value!r:.80}, expected a whole number from 0")
    return value


def write_shown(content: Content) -> dict[str, Any]:
    """Encode an observation: its text and its images, if any."""
    if isinstance(content, str):
        return {"text": content}
    images = [part for part in write_content(content) if "image" in part]
    return {"text": text_of(content), **({"images": images} if images else {})}


def write_observation(
    fields: Mapping[str, Any], reward: float | None, episode: ServedEpisode, info: Mapping[str, Any]
) -> dict[str, Any]:
    """Encode the answer to a reset or a step that `episode` has executed."""
    metadata = {**episode.state.to_plain(), "info": dict(info)}
    observation = {**fields, "metadata": metadata}
    return {"observation": observation, "reward": reward, "done": episode.state.is_over, "metadata": metadata}


def write_state(episode: ServedEpisode, name: str) -> dict[str, Any]:
    """Write the state of an episode."""
    state = episode.state.to_plain()
    return {"episode_id": name, "step_count": state.pop("steps"), **state}


def write_tool(tool: Tool) -> dict[str, Any]:
    """Write a tool."""
    function = tool.schema["function"]
    return {
        "name": tool.name,
        "description": function.get("description", ""),
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
    }


def write_shown_task(task: Task, index: int) -> dict[str, Any]:
    """Encode the public fields of a task, without its answer."""
    return {"index": index, "id": task.id, "type": task.type, "prompt": task.prompt}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvCall:
    """The result of a tool call."""

    tool: str
    text: str | None = None
    images: Sequence[Mapping[str, Any]] = ()
    reward: float = 0.0
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    error: Mapping[str, str] | None = None
    """Type and message of the error that the policy reads."""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the observation."""
        images = {"images": list(self.images)} if self.images else {}
        return {"tool_name": self.tool, "result": self.text, "error": self.error, **images}


async def call_for_observation(episode: ServedEpisode, name: str, arguments: Mapping[str, Any]) -> OpenEnvCall:
    """Call a tool; errors that the policy can fix are part of the result.

    Raises:
        AgentRLError: no episode is running, or the environment failed.
    """
    try:
        result = await episode.call_tool(name, arguments)
    except ToolError as error:
        kind = "invalid_args" if isinstance(error.__cause__, WrongArguments) else "execution_error"
        kind = kind if name in episode.tools else "tool_not_found"
        return OpenEnvCall(tool=name, error={"error_type": kind, "message": str(error)})
    images = write_shown(result.content).get("images", ())
    return OpenEnvCall(tool=name, text=result.text, images=images, reward=result.reward, metrics=result.metrics)


def write_error(code: str, message: str) -> dict[str, Any]:
    """Write the answer to a message that failed."""
    return {"type": "error", "data": {"message": message, "code": code}}


def write_rpc_error(number: Any, code: str, message: str) -> dict[str, Any]:
    """Write the error of a JSON-RPC request; `code` is a key of `RPC_CODES`."""
    return {"jsonrpc": "2.0", "id": number, "error": {"code": RPC_CODES.get(code, -32602), "message": message}}


_TEXT = {"type": "string"}
SCHEMAS: Mapping[str, Any] = {
    "action": {
        "title": "Action",
        "oneOf": [
            {"type": "object", "properties": {"action": _TEXT}, "required": ["action"]},
            {
                "type": "object",
                "properties": {"type": {"const": "call_tool"}, "tool_name": _TEXT, "arguments": {"type": "object"}},
                "required": ["type", "tool_name"],
            },
            {"type": "object", "properties": {"type": {"const": "list_tools"}}, "required": ["type"]},
        ],
    },
    "observation": {
        "title": "Observation",
        "type": "object",
        "properties": {
            "text": _TEXT,
            "images": {"type": "array", "items": {"type": "object"}},
            "tool_name": _TEXT,
            "result": {"type": ["string", "null"]},
            "error": {"type": ["object", "null"]},
            "metadata": {"type": "object"},
        },
    },
    "state": {
        "title": "State",
        "type": "object",
        "properties": {
            "episode_id": _TEXT,
            "step_count": {"type": "integer"},
            "task_id": {"type": ["string", "null"]},
            "total_reward": {"type": "number"},
            "done": {"type": "boolean"},
            "terminated": {"type": "boolean"},
            "truncated": {"type": "boolean"},
            "success": {"type": ["boolean", "null"]},
        },
    },
}
"""JSON schemas of the answer of ``/schema``."""
