"""The tools of an MCP server, over its standard input and output or over streamable HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from agentrl.errors import ToolError, UsageError
from agentrl.tool import TOOL_NAME, ForwardedTool, Tool, ToolDependencies, ToolResult, ToolRules, Toolset
from agentrl.tool.schema import WrongArguments

from .mcp_arguments import EXTRA, MAX_PROBLEM_LENGTH, Checker, InputSchema
from .mcp_results import NOTHING, result_value
from .mcp_session import MCP_START_S, MCPConnection, Session
from .mcp_stdio import mended_lines
from .mcp_transport import http_client, mended

MAX_CALL_S = 3600.0
"""Maximum seconds without data from a server over HTTP; a call's own deadline is shorter."""
MAX_NAME_LENGTH = 64
_VARIABLE = re.compile(r"\$(?:\$|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
_UNKNOWN = re.compile(r"\$\{[^}]*\}?")
"""Pattern of a variable in another notation, such as ``${NAME:-default}``."""

_log = logging.getLogger(__name__)


class MCPTools(Toolset):
    """Tools of an MCP server.

    Each episode has its own session with the server, and with ``command`` its own server, unless `shared` is set.

    Args:
        command: Command of a server that uses its standard input and output.
        url: Address of a server that uses streamable HTTP.
        env: Environment variables of the command; ``$NAME`` or ``${NAME}`` stands for a variable of this process,
            ``$$`` for a dollar sign.
        headers: Headers of requests to `url`, with variables as in `env`, so that configs contain no secrets.
        tools: Names of the tools to offer; all if left out.
        prefix: Prefix of the tools' names.
        shared: All episodes share one session: only for servers without state.
        timeout_s: Time limit of a call in seconds; ``agent.tool_timeout_s`` if left out.
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
            raise UsageError("an MCP server needs one address", expected="either command (a list of words) or url")
        if (url is None and headers is not None) or (command is None and env is not None):
            ignored = "headers" if url is None else "env"
            raise UsageError(
                f"option {ignored} of tool mcp has no effect here", expected="env with command, headers with url"
            )
        EXTRA.load()
        self._command = command
        self._url = url
        self._env = _fill_in(env or {})
        self._headers = _fill_in(headers or {})
        self._only = tools
        self._prefix = prefix
        self._shared = shared
        self._timeout_s = timeout_s
        self._tools: list[Tool] | None = None
        self._asking = asyncio.Lock()
        self._reopening = asyncio.Lock()
        self._lasting: tuple[AsyncExitStack, Session] | None = None
        self._has_reported = False

    @property
    def address(self) -> str:
        """Command or URL of the server, for messages."""
        return self._url or " ".join(self._command or [])

    async def tools(self) -> Sequence[Tool]:
        """Return the server's tools; they are requested once."""
        async with self._asking:
            if self._tools is None:
                self._tools = await self._ask()
        return self._tools

    async def _ask(self) -> list[Tool]:
        async with self.session() as session:
            described = await session.list_tools()
        if not described:
            raise UsageError(f"the MCP server {self.address} offers no tools", expected="a server with at least one")
        names = _offered_names([one.name for one in described], self._prefix)
        if unknown := set(self._only or ()) - names.keys() - set(names.values()):
            raise UsageError(
                f"the MCP server {self.address} has no such tools",
                got=", ".join(sorted(unknown)),
                expected=", ".join(names),
            )
        return [
            MCPTool(self, one, names[one.name], self._timeout_s)
            for one in described
            if self._only is None or {one.name, names[one.name]} & set(self._only)
        ]

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Open a session: the shared one, or a new one that ends with the context."""
        if self._shared:
            yield await self._lasting_session()
            return
        async with self._open() as session:
            yield session

    def _open(self) -> MCPConnection:
        return MCPConnection(self._connect, self.address, is_remote=self._url is not None)

    def _report_output(self, text: str) -> None:
        """Report once that the command writes other texts than messages to its standard output."""
        if not self._has_reported:
            self._has_reported = True
            what = (
                "the MCP server %s also writes other texts than messages to its standard output; they are ignored: %s"
            )
            _log.warning(what, self.address, text)

    async def _lasting_session(self) -> Session:
        async with self._reopening:
            if self._lasting is None or self._lasting[1].is_over:
                await self._leave()
                stack = AsyncExitStack()
                self._lasting = stack, await stack.enter_async_context(self._open())
            return self._lasting[1]

    @asynccontextmanager
    async def _connect(self, errors: Any) -> AsyncIterator[Any]:
        """Open a client of the `mcp` package; it must be entered and left in the same task."""
        mcp = EXTRA.load()
        if self._command is not None:
            stdio = EXTRA.load("mcp.client.stdio")
            program, *words = self._command
            parameters = mcp.StdioServerParameters(
                command=program, args=words, env=self._env or None, encoding_error_handler="replace"
            )
            transport = stdio.stdio_client(parameters, errlog=errors)
            async with mcp.Client(mended_lines(transport, self._report_output)) as client:
                yield client
            return
        http, httpx = EXTRA.load("mcp.client.streamable_http"), EXTRA.load("httpx2")
        patience = httpx.Timeout(MCP_START_S, read=MAX_CALL_S)
        async with (
            http_client(errors, headers=self._headers, timeout=patience) as requests,
            mcp.Client(mended(http.streamable_http_client(self._url, http_client=requests))) as client,
        ):
            yield client

    async def close(self) -> None:
        """End the shared session."""
        await self._leave()

    async def _leave(self) -> None:
        lasting, self._lasting = self._lasting, None
        if lasting is not None:
            await lasting[0].aclose()


class MCPTool(ForwardedTool):
    """One tool of a server."""

    open_deadline_s = MCP_START_S + 5.0

    def __init__(self, toolset: MCPTools, described: Any, name: str, timeout_s: float | None) -> None:
        description = described.description or described.title or described.name
        reads = described.annotations is not None and described.annotations.read_only_hint is True
        self._input = InputSchema(described.name, described.input_schema)
        function = {"name": name, "description": description, "parameters": self._input.shown}
        rules = ToolRules(parallel=reads, timeout_s=timeout_s)
        super().__init__(name, {"type": "function", "function": function}, rules)
        output = described.output_schema
        self._output = None if output is None else Checker(f"the output schema of MCP tool {described.name}", output)
        self._has_warned = False
        self._toolset = toolset
        self._own_name = described.name

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments in the form of the server's schema.

        Raises:
            ToolError: some arguments are wrong; the error names each of them.
        """
        try:
            return self._input.read(arguments)
        except WrongArguments as error:
            takes = ", ".join(self._input.names) or "no arguments"
            raise ToolError(f"wrong arguments for {self.name}: {error}; it takes: {takes}") from error

    async def open(self, stack: AsyncExitStack, provisions: ToolDependencies | None = None) -> Callable[..., Any]:
        """Open the episode's session with the server."""
        context = None if provisions is None else provisions.context
        if context is None:
            session = await stack.enter_async_context(self._toolset.session())
        else:
            session = await context.shared(("mcp", id(self._toolset)), self._toolset.session)
        return session.call

    async def run(self, bound: Callable[..., Any], checked: Mapping[str, Any]) -> ToolResult:
        """Call the tool on the server."""
        result = await bound(self._own_name, checked)
        self._compare(result.structured_content)
        return ToolResult(result_value(result) or NOTHING)

    def _compare(self, structured: Any) -> None:
        """Warn once if structured content breaks the tool's own output schema; the policy still reads it."""
        if self._output is None or self._has_warned or structured is None:
            return
        if errors := self._output.errors(structured):
            self._has_warned = True
            what = f"results of MCP tool {self._own_name} break its own output schema"
            _log.warning("%s: %s; they are passed on unchanged", what, errors[0].message[:MAX_PROBLEM_LENGTH])


def _offered_names(names: Sequence[str], prefix: str) -> dict[str, str]:
    """Return the name under which each tool is offered; characters that are not allowed in tool names become ``_``.

    A name that is too long or no longer unique ends with a checksum.
    """
    offered: dict[str, str] = {}
    for name in names:
        written = re.sub(r"[^a-zA-Z0-9_-]", "_", prefix + name)
        if not TOOL_NAME.fullmatch(written) or written in offered.values():
            checksum = hashlib.sha256(name.encode()).hexdigest()[:8]
            written = f"{written[: MAX_NAME_LENGTH - 9]}_{checksum}"
        offered[name] = written
    return offered


def _fill_in(values: Mapping[str, str]) -> dict[str, str]:
    """Replace the names of environment variables by their values.

    Raises:
        UsageError: a variable is not set, or is written in an unknown form.
    """
    for value in values.values():
        if unknown := _UNKNOWN.search(_VARIABLE.sub("", value)):
            raise UsageError(
                "an environment variable cannot be read",
                got=unknown[0],
                expected="$NAME or ${NAME}",
                hint="write $$ for a dollar sign",
            )
    names = {one or other for value in values.values() for one, other in _VARIABLE.findall(value)} - {""}
    if missing := sorted(names - os.environ.keys()):
        raise UsageError(
            f"an environment variable is not set: {', '.join(missing)}", hint="set it, or write $$ for a dollar sign"
        )
    return {
        name: _VARIABLE.sub(lambda found: os.environ.get(found[1] or found[2] or "", "$"), value)
        for name, value in values.items()
    }
