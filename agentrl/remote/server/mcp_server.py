"""An environment as an MCP server, by the ``mcp`` package: over streamable HTTP, or standard input and output.

A session plays one episode at a time. Its tools are the environment's tools and three more: ``start_episode``, ``act``
and ``episode_state``. Rewards and the end are in ``_meta`` of each result, which clients do not show to a model, and in
the resource `STATE`.

Protocol versions up to 2025-11-25 have sessions. Version 2026-07-28 has none, so a server over HTTP rejects its
``server/discover``, and clients that support both fall back to sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from agentrl.env import EnvironmentSpec
from agentrl.errors import AgentRLError, ToolError, UsageError
from agentrl.message import Content, TextPart
from agentrl.registry import Extra
from agentrl.remote.listening import BODY_S, IDLE_CONNECTION_S, SLOWEST, is_own_host, is_own_origin, own_names
from agentrl.remote.server.episodes import EpisodeHost, ServedEpisode, TaskChoice, first_text
from agentrl.remote.server.server import ServerSettings
from agentrl.remote.server.session import Clock, Leases
from agentrl.remote.wire import MAX_CALL_BYTES, Refusal, to_json, write_content
from agentrl.tool import Tool

MCP = Extra(name="mcp", module="mcp")
PATH = "/mcp"
STATE = "episode://state"
"""Address of the resource with the state of the session's episode, as JSON."""
META = "agentrl/"
"""Prefix of the keys in ``_meta``: reward, total_reward, done, terminated, truncated, success, task_id, steps."""
OVER = "The episode is over."
UVICORN_START_S = 30.0
_INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS, _INTERNAL = -32600, -32601, -32602, -32603
"""Error codes of JSON-RPC."""
_STDIO = "standard-input"
"""Session of a server over standard input and output."""

Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]
Asgi: TypeAlias = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


def start_episode(split: str | None = None, index: int | None = None, seed: int | None = None) -> None:
    """Start an episode and return its first observation. An episode that is still running is abandoned.

    Args:
        split: Name of a set of tasks (default: the first one).
        index: Index of the task in the set.
        seed: Number that selects a task; use either an index or a seed.
    """


def act(action: str) -> None:
    """Take an action and return the environment's response.

    Args:
        action: The action, as text.
    """


def episode_state() -> None:
    """Return the state of the episode as JSON: its task, the number of steps, and whether it is over."""


_FUNCTIONS: tuple[Callable[..., None], ...] = (start_episode, act, episode_state)
_CONTROLS = {tool.name: tool for tool in map(Tool, _FUNCTIONS)}


class MCPServer:
    """Server of one environment; it belongs to one event loop. `options` override those of `spec`.

    Raises:
        UsageError: the extra is not installed, or the environment has roles that a run plays.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        options: Mapping[str, Any],
        settings: ServerSettings,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._mcp, self._types = MCP.load(), MCP.load("mcp.types")
        self.url = ""
        self.settings = settings
        self._host = EpisodeHost(spec, options, settings, starter="start_episode", clock=clock)
        self.sessions: Leases[ServedEpisode] = Leases(
            ("session", "sessions"), most=settings.max_sessions, lease_s=settings.lease_s
        )
        self._running: asyncio.Task[None] | None = None
        self._http: Any = None
        self._ready = asyncio.Event()

    async def start(self) -> None:
        """Make an environment to describe it, then listen.

        Raises:
            UsageError: the options are wrong, a tool has the name of one of this server's tools, or the port is taken.
            EnvironmentFailure: the environment cannot be made.
        """
        await self._describe()
        security = MCP.load("mcp.server.transport_security").TransportSecuritySettings
        application = self._make_server(has_sessions=True).streamable_http_app(
            streamable_http_path=PATH,
            max_request_body_size=MAX_CALL_BYTES,
            session_idle_timeout=self.settings.lease_s,
            max_sessions=self.settings.max_sessions,
            transport_security=security(enable_dns_rebinding_protection=False),  # `_guard` does it
        )
        await self._listen(self._guard(application))
        self.sessions.start_expiring()

    async def run_on_stdio(self) -> None:
        """Serve one client over standard input and output until the input ends.

        Raises:
            UsageError: the options are wrong, or a tool has a name of this server's.
            EnvironmentFailure: the environment cannot be made.
        """
        await self._describe()
        server = self._make_server(has_sessions=False)
        async with MCP.load("mcp.server.stdio").stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())

    async def close(self) -> None:
        """Stop listening, and close all sessions and environments; idempotent."""
        running, self._running = self._running, None
        if running is not None:
            self._http.should_exit = True
            await asyncio.wait({running})
        await self.sessions.close()
        await self._host.close()

    async def _describe(self) -> None:
        await self._host.describe()
        if taken := sorted({tool.name for tool in self._host.tools} & _CONTROLS.keys()):
            raise UsageError(
                f"tools of environment {self._host.spec.name} have the same names as the MCP server's own tools",
                got=", ".join(taken),
                expected=f"other names than {', '.join(_CONTROLS)}",
            )

    async def _listen(self, application: Asgi) -> None:
        uvicorn = MCP.load("uvicorn")
        host, port = self.settings.host, self.settings.port
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}", got=error.strerror, hint="choose another --host or --port"
            ) from error
        found, number = listening.getsockname()[:2]
        self.url = f"http://[{found}]:{number}{PATH}" if ":" in found else f"http://{found}:{number}{PATH}"
        config = uvicorn.Config(
            application,
            log_level="error",
            http=_connections_with_a_deadline(),
            limit_concurrency=self.settings.most_connections,
            timeout_graceful_shutdown=1,
        )
        self._http = uvicorn.Server(config)
        self._http.capture_signals = contextlib.nullcontext  # the command stops the server
        self._running = asyncio.create_task(self._http.serve(sockets=[listening]))
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({ready, self._running}, timeout=UVICORN_START_S, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._ready.is_set():
            raise UsageError(f"the MCP server at {self.url} did not start", got=f"nothing in {UVICORN_START_S:g} s")

    def _guard(self, application: Asgi) -> Asgi:
        """Admit requests as `agentrl.remote.listening.guard` does, and close the episode of a deleted session."""
        names = own_names(self.settings.host)
        wanted = None if self.settings.token is None else f"Bearer {self.settings.token}".encode()

        async def call(scope: dict[str, Any], receive: Receive, send: Send) -> None:
            async def note(message: dict[str, Any]) -> None:
                await send(message)
                if message["type"] == "lifespan.startup.complete":
                    self._ready.set()

            if scope["type"] != "http":
                await application(scope, receive, note)
                return
            headers = {name.decode("latin-1"): value for name, value in scope["headers"]}

            async def end(message: dict[str, Any]) -> None:
                if message["type"] == "http.response.start":  # the client may count on it once it has the answer
                    self.sessions.end(headers.get("mcp-session-id", b"").decode("latin-1"))
                await send(message)

            host, origin = (headers.get(name, b"").decode("latin-1") for name in ("host", "origin"))
            is_own = is_own_host(host, names) and (not origin or is_own_origin(origin, names))
            if wanted is None and not is_own:
                await _refuse(send, 403, "without a token this server accepts only requests to its own names")
            elif wanted is not None and not hmac.compare_digest(headers.get("authorization", b""), wanted):
                await _refuse(send, 401, "wrong token" if "authorization" in headers else "no token")
            else:
                try:
                    replay = await _receive_body(receive)
                except TimeoutError:
                    await _refuse(send, 408, "the request did not arrive in time")
                    return
                await application(scope, replay, end if scope["method"] == "DELETE" else send)

        return call

    def _make_server(self, *, has_sessions: bool) -> Any:
        lowlevel, spec = MCP.load("mcp.server.lowlevel"), self._host.spec
        rules = spec.tool_instructions if self._host.tools and spec.tool_instructions else spec.instructions
        server = lowlevel.Server(
            spec.name,
            version=str(spec.version),
            instructions=f"{spec.description}\n\nStart an episode with start_episode. {rules}".strip(),
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_read_resource=self._read_resource,
        )
        if has_sessions:
            request_params = self._types.RequestParams
            server.add_request_handler("server/discover", request_params, self._refuse_discovery)
        return server

    async def _refuse_discovery(self, _context: Any, _params: Any) -> Any:
        raise self._mcp.MCPError(code=_NO_METHOD, message="this server requires a session: call initialize first")

    async def _session(self, context: Any) -> ServedEpisode:
        """Return the session of a request, which is opened by its first one."""
        name = _STDIO if context.request is None else context.request.headers.get("mcp-session-id")
        if name is None:
            raise self._mcp.MCPError(
                code=_INVALID_REQUEST, message="this server requires a session: call initialize first"
            )

        async def begin() -> ServedEpisode:
            return self._host.open()

        try:
            return await self.sessions.open(name, begin)
        except Refusal as error:
            raise self._mcp.MCPError(code=_INTERNAL, message=str(error)) from error

    async def _list_tools(self, context: Any, _params: Any) -> Any:
        session = await self._session(context)
        own = list(session.tools.values()) or self._host.tools
        return self._types.ListToolsResult(tools=[self._wire_tool(tool) for tool in (*_CONTROLS.values(), *own)])

    def _wire_tool(self, tool: Tool) -> Any:
        function, spec = tool.schema["function"], self._host.spec
        description = function.get("description", "")
        if tool is _CONTROLS[start_episode.__name__]:
            description += f" Sets of tasks: {', '.join(spec.splits)}."
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        return self._types.Tool(name=tool.name, description=description, input_schema=schema)

    async def _call_tool(self, context: Any, params: Any) -> Any:
        name, arguments = params.name, params.arguments or {}
        session = await self._session(context)
        if name not in {*_CONTROLS, *session.tools} | {tool.name for tool in self._host.tools}:
            raise self._mcp.MCPError(code=_INVALID_PARAMS, message=f"unknown tool {name[:80]!r}")
        try:
            shown, reward = await self._carry_out(session, name, arguments)
        except (ToolError, UsageError) as error:  # the model reads it
            return self._result(session, str(error), is_error=True)
        except AgentRLError as error:
            raise self._mcp.MCPError(code=_INTERNAL, message=str(error)) from error
        return self._result(session, shown, reward)

    async def _carry_out(
        self, session: ServedEpisode, name: str, arguments: Mapping[str, Any]
    ) -> tuple[Content, float]:
        """Call a tool; return the content for the model, and the reward."""
        if name not in _CONTROLS:
            called = await session.call_tool(name, arguments)
            return called.content, called.reward
        checked = _CONTROLS[name].validate(arguments)
        if name == act.__name__:
            result = await session.step(checked["action"])
            return result.observation, result.reward
        if name == start_episode.__name__:
            begun = await session.start(TaskChoice(**checked))
            assert session.state.task is not None
            return first_text(session.state.task, begun.observation), 0.0
        shown = {key: session.state.to_plain()[key] for key in ("task_id", "steps", "done")}
        return json.dumps(shown), 0.0

    def _result(self, session: ServedEpisode, shown: Content, reward: float = 0.0, *, is_error: bool = False) -> Any:
        parts = shown if not isinstance(shown, str) else (TextPart(text=shown),)
        content = [self._content(part) for part in write_content(parts)]
        if session.state.is_over and not is_error:
            content.append(self._types.TextContent(type="text", text=OVER))
        meta = {f"{META}{key}": value for key, value in {"reward": reward, **session.state.to_plain()}.items()}
        return self._types.CallToolResult(content=content, is_error=is_error, _meta=meta)

    def _content(self, part: Mapping[str, Any]) -> Any:
        if "text" in part:
            return self._types.TextContent(type="text", text=part["text"])
        return self._types.ImageContent(type="image", data=part["image"], mime_type=part["media_type"])

    async def _list_resources(self, _context: Any, _params: Any) -> Any:
        described = "State of the episode: rewards, steps, and whether it is over."
        state = self._types.Resource(uri=STATE, name="state", description=described, mime_type="application/json")
        return self._types.ListResourcesResult(resources=[state])

    async def _read_resource(self, context: Any, params: Any) -> Any:
        if str(params.uri) != STATE:
            raise self._mcp.MCPError(code=_INVALID_PARAMS, message=f"no resource {str(params.uri)[:80]}")
        text = to_json((await self._session(context)).state.to_plain()).decode()
        content = self._types.TextResourceContents(uri=STATE, mime_type="application/json", text=text)
        return self._types.ReadResourceResult(contents=[content])


def _connections_with_a_deadline() -> Any:
    """Make uvicorn close connections without a request in `IDLE_CONNECTION_S`, because they count for its limit."""
    base = MCP.load("uvicorn.protocols.http.h11_impl").H11Protocol

    class IdleConnection(base):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            asyncio.get_running_loop().call_later(IDLE_CONNECTION_S, self._close_if_silent)

        def _close_if_silent(self) -> None:
            if self.cycle is None:
                self.transport.abort()

    return IdleConnection


async def _receive_body(receive: Receive) -> Receive:
    """Read a request's body within the deadlines of `agentrl.remote.listening`; return a function that replays it.

    Bytes after the first `MAX_CALL_BYTES` are left to the application, which rejects them.

    Raises:
        TimeoutError: the body is late.
    """
    loop, size, read = asyncio.get_running_loop(), 0, list[dict[str, Any]]()
    last = loop.time() + BODY_S + MAX_CALL_BYTES / SLOWEST
    async with asyncio.timeout(BODY_S) as limit:
        while size <= MAX_CALL_BYTES and (not read or read[-1].get("more_body")):
            read.append(await receive())
            size += len(read[-1].get("body", b""))
            limit.reschedule(min(last, loop.time() + BODY_S))
    messages = iter(read)

    async def replay() -> dict[str, Any]:
        return next(messages, None) or await receive()

    return replay


async def _refuse(send: Send, status: int, message: str) -> None:
    body = to_json({"jsonrpc": "2.0", "id": None, "error": {"code": _INVALID_REQUEST, "message": message}})
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
