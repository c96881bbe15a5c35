"""The tools of an MCP server, over its standard input and output or over streamable HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from agentrl.errors import AgentRLError, EnvironmentFailure, ToolError, UsageError
from agentrl.registry import Extra
from agentrl.tool import Provisions, Tool, ToolResult, ToolRules, Toolset

EXTRA = Extra(name="mcp", module="mcp")
START_S = 60.0
"""Deadline of a server that starts."""
LONGEST_CALL_S = 3600.0
"""Seconds without a word from a server over HTTP; a call's own deadline is shorter."""
_BAD_CALL = (-32602, -32601)
"""Errors of JSON-RPC that are the caller's: wrong parameters, no such method."""


class MCPTools(Toolset):
    """Every tool of an MCP server.

    Each episode has a session of its own with the server, and with ``command`` a server of its own, unless `shared`.

    Args:
        command: Starts a server that speaks over its standard input and output.
        url: Address of a server that speaks streamable HTTP.
        env: Environment variables of the command; ``$NAME`` stands for one of this process's.
        headers: Of requests to `url`; ``$NAME`` stands for an environment variable, so that no secret is in a config.
        tools: Names of the tools to offer; all when left out.
        prefix: Put before the names.
        shared: All episodes share one session: only for servers that remember nothing.
        timeout_s: Deadline of a call; ``agent.tool_timeout_s`` when left out.
    """

    def __init__(
        self,
        *,
        command: list[str] | None = None,
        url: str | None = None,
        env: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        tools: list[str] | None = None,
        prefix: str = "",
        shared: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        if (command is None) == (url is None):
            raise UsageError("an MCP server is reached in one way", expected="command (a list of words) or url")
        if (url is None and headers is not None) or (command is None and env is not None):
            ignored = "headers" if url is None else "env"
            raise UsageError(f"option {ignored} of tools mcp is ignored", expected="env with command, headers with url")
        EXTRA.load()
        self._command = command
        self._url = url
        self._env = _filled_in(env or {})
        self._headers = _filled_in(headers or {})
        self._only = tools
        self._prefix = prefix
        self._shared = shared
        self._timeout_s = timeout_s
        self._tools: list[Tool] | None = None
        self._asking = asyncio.Lock()
        self._lasting: tuple[AsyncExitStack, Session] | None = None

    @property
    def place(self) -> str:
        """Where the server is, for messages."""
        return self._url or " ".join(self._command or [])

    async def tools(self) -> Sequence[Tool]:
        """The server's tools, asked for once."""
        async with self._asking:
            if self._tools is None:
                self._tools = await self._ask()
        return self._tools

    async def _ask(self) -> list[Tool]:
        async with self.session() as session:
            described = await session.described()
        names = [one.name for one in described]
        if unknown := set(self._only or ()) - set(names):
            raise UsageError(
                f"the MCP server {self.place} has no such tools",
                got=", ".join(sorted(unknown)),
                expected=", ".join(names),
            )
        return [
            MCPTool(self, one, self._prefix, self._timeout_s)
            for one in described
            if self._only is None or one.name in self._only
        ]

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A session for a while: the shared one, or one of its own."""
        if self._shared:
            yield await self._lasting_session()
            return
        async with _Opened(self._connect, self.place) as session:
            yield session

    async def _lasting_session(self) -> Session:
        if self._lasting is None or self._lasting[1].is_over:
            await self._leave()
            stack = AsyncExitStack()
            self._lasting = stack, await stack.enter_async_context(_Opened(self._connect, self.place))
        return self._lasting[1]

    @asynccontextmanager
    async def _connect(self, errors: Any) -> AsyncIterator[Any]:
        """The client of the `mcp` package, to be entered and left in one task."""
        mcp = EXTRA.load()
        if self._command is not None:
            stdio = EXTRA.load("mcp.client.stdio")
            program, *words = self._command
            parameters = mcp.StdioServerParameters(command=program, args=words, env=self._env or None)
            async with mcp.Client(stdio.stdio_client(parameters, errlog=errors)) as client:
                yield client
            return
        http, httpx = EXTRA.load("mcp.client.streamable_http"), EXTRA.load("httpx2")
        patience = httpx.Timeout(START_S, read=LONGEST_CALL_S)
        async with (
            httpx.AsyncClient(headers=self._headers, timeout=patience) as http_client,
            mcp.Client(http.streamable_http_client(self._url, http_client=http_client)) as client,
        ):
            yield client

    async def close(self) -> None:
        """End the shared session."""
        await self._leave()

    async def _leave(self) -> None:
        lasting, self._lasting = self._lasting, None
        if lasting is not None:
            await lasting[0].aclose()


class Session:
    """An open session with a server.

    Args:
        client: Of the `mcp` package, entered.
        place: Where the server is.
        owner: The task that entered it.
    """

    def __init__(self, client: Any, place: str, owner: asyncio.Task[None]) -> None:
        self._client = client
        self._place = place
        self._owner = owner

    @property
    def is_over(self) -> bool:
        """Whether the connection was lost."""
        return self._owner.done()

    async def described(self) -> list[Any]:
        """What the server tells about its tools."""
        found: list[Any] = []
        cursor = None
        while True:
            page = await self._checked(self._client.list_tools(cursor=cursor))
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool says.

        Raises:
            ToolError: the server says that the call is wrong, or that it failed.
            EnvironmentFailure: the server is lost.
        """
        result = await self._checked(self._client.call_tool(name, dict(arguments)))
        text = "\n".join(_text(part) for part in result.content)
        if result.is_error:
            raise ToolError(text or f"{name} failed")
        return text or "[nothing]"

    async def _checked(self, asking: Any) -> Any:
        mcp_error = EXTRA.load("mcp").MCPError
        try:
            return await asking
        except AgentRLError:
            raise
        except Exception as error:
            if isinstance(error, mcp_error) and error.error.code in _BAD_CALL:
                raise ToolError(str(error)) from error
            raise EnvironmentFailure(f"the MCP server {self._place} failed", got=_innermost(error)) from error


class _Opened:
    """Keeps a connection in a task of its own: the `mcp` package wants to be left where it was entered."""

    def __init__(self, connect: Callable[[Any], Any], place: str) -> None:
        self._connect = connect
        self._place = place
        self._leave = asyncio.Event()

    async def __aenter__(self) -> Session:
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(ready), name=f"MCP {self._place}")
        try:
            async with asyncio.timeout(START_S):
                client = await ready
        except BaseException:
            await self.__aexit__()
            raise
        return Session(client, self._place, self._owner)

    async def __aexit__(self, *error: object) -> None:
        self._leave.set()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._owner, START_S)

    async def _own(self, ready: asyncio.Future[Any]) -> None:
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            try:
                async with self._connect(errors) as client:
                    ready.set_result(client)
                    await self._leave.wait()
            except Exception as error:
                if ready.done():
                    raise
                errors.seek(0)
                said = errors.read()[-500:].strip()
                ready.set_exception(
                    EnvironmentFailure(
                        f"the MCP server {self._place} does not start",
                        got=_innermost(error),
                        hint=f"it said: {said}" if said else None,
                    )
                )


class MCPTool(Tool):
    """One tool of a server."""

    open_deadline_s = START_S + 5.0

    def __init__(self, toolset: MCPTools, described: Any, prefix: str, timeout_s: float | None) -> None:
        told = described.description or described.title or described.name
        reads = described.annotations is not None and described.annotations.read_only_hint is True
        self.name = prefix + described.name
        self.rules = ToolRules(parallel=reads, timeout_s=timeout_s)
        self.options = {}
        self.schema = {
            "type": "function",
            "function": {"name": self.name, "description": told, "parameters": described.input_schema},
        }
        self._toolset = toolset
        self._own_name = described.name

    @property
    def is_stateful(self) -> bool:
        """Its state is the server's."""
        return False

    @property
    def needs_sandbox(self) -> bool:
        """The server runs where the config says."""
        return False

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, if they fit the server's schema.

        Raises:
            ToolError: names each wrong argument.
        """
        schema = self.schema["function"]["parameters"]
        known = schema.get("properties", {})
        problems = [f"{name} is no argument" for name in arguments if name not in known and _is_closed(schema)]
        validator = EXTRA.load("jsonschema").Draft202012Validator(schema)
        problems += [_problem(error) for error in validator.iter_errors(dict(arguments))]
        if problems:
            takes = ", ".join(known) or "no arguments"
            raise ToolError(f"wrong arguments for {self.name}: {'; '.join(problems)}. It takes {takes}")
        return dict(arguments)

    async def open(self, stack: AsyncExitStack, provisions: Provisions | None = None) -> Callable[..., Any]:
        """The episode's session with the server."""
        context = None if provisions is None else provisions.context
        if context is None:
            session = await stack.enter_async_context(self._toolset.session())
        else:
            session = await context.shared(("mcp", id(self._toolset)), self._toolset.session)
        return session.call

    async def run(self, bound: Callable[..., Any], checked: Mapping[str, Any]) -> ToolResult:
        """Ask the server."""
        return ToolResult(await bound(self._own_name, checked))


def _innermost(error: BaseException) -> str:
    """The first error within groups of errors, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _is_closed(schema: Mapping[str, Any]) -> bool:
    return not schema.get("additionalProperties") and "patternProperties" not in schema


def _problem(error: Any) -> str:
    where = ".".join(map(str, error.absolute_path))
    return f"{where}: {error.message}" if where else str(error.message)


def _text(part: Any) -> str:
    """A piece of an answer in words: the policy reads text."""
    if part.type == "text":
        return str(part.text)
    if part.type == "resource" and getattr(part.resource, "text", None) is not None:
        return str(part.resource.text)
    if part.type == "resource_link":
        return f"[{part.name}: {part.uri}]"
    return f"[{part.type}: {getattr(part, 'mime_type', None) or 'unknown'}]"


def _filled_in(values: Mapping[str, str]) -> dict[str, str]:
    filled = {name: os.path.expandvars(value) for name, value in values.items()}
    if missing := [name for name, value in filled.items() if value.startswith("$")]:
        raise UsageError("an environment variable is not set", got=", ".join(values[name] for name in missing))
    return filled
