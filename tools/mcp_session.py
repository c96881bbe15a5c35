"""Sessions with an MCP server: opening, closing, listing tools, calls, and lost connections.

`mcp_results` converts what a call returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.errors import AgentRLError, EnvironmentFailure, ToolError

from .mcp_arguments import EXTRA
from .mcp_results import complete_result, error_text, first_problem, result_text

MCP_START_S = 60.0
"""Seconds that a server has to start."""
LIST_S = 60.0
"""Seconds that a server has to list its tools."""
MCP_STOP_S = 5.0
"""Seconds that a server has to end if it did not start."""
MAX_QUOTE_LENGTH = 500
_CLOSED = "Connection closed"
_LOST = (-32000, -32001, -32600, 32600)
"""JSON-RPC error codes that mean a lost session over HTTP: closed, timed out, terminated."""
_HTTP_ERROR = (-32603, "Server returned an error response")
"""Error that the client raises for an HTTP status of 400 or more."""


class Session:
    """An open session with a server.

    Args:
        client: An entered client of the `mcp` package.
        address: Command or URL of the server.
        owner: The task that entered the client.
        is_remote: True if the server is reached over HTTP.
        last_errors: Function that reads the end of the server's standard error.
    """

    def __init__(
        self,
        client: Any,
        address: str,
        owner: asyncio.Task[None],
        *,
        is_remote: bool,
        last_errors: Callable[[], str | None],
    ) -> None:
        self._client = client
        self._address = address
        self._owner = owner
        self._is_remote = is_remote
        self._last_errors = last_errors
        self._is_lost = False
        # the client would drop a result that breaks the tool's own output schema and raise: `MCPTool` checks instead
        client.session.validate_tool_result = _accept_result

    @property
    def is_over(self) -> bool:
        """True if the connection was lost."""
        return self._is_lost or self._owner.done()

    async def list_tools(self) -> list[Any]:
        """Ask the server for its tools.

        Raises:
            EnvironmentFailure: it does not answer in time, or the answer is not valid.
        """
        try:
            async with asyncio.timeout(LIST_S):
                return await self._all_pages()
        except TimeoutError as error:
            raise EnvironmentFailure(
                f"the MCP server {self._address} does not list its tools", got=f"no answer in {LIST_S:g} s"
            ) from error
        except ToolError as error:
            raise EnvironmentFailure(f"the MCP server {self._address} does not list its tools", got=error) from error

    async def _all_pages(self) -> list[Any]:
        found: list[Any] = []
        seen: set[str] = set()
        cursor = None
        while True:
            page = await self._request(self._client.list_tools(cursor=cursor))
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found
            if cursor in seen:
                raise EnvironmentFailure(
                    f"the MCP server {self._address} never stops listing its tools", got=f"cursor {cursor!r} twice"
                )
            seen.add(cursor)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool; return the `CallToolResult`.

        Raises:
            ToolError: the server answers with an error, or with something that is not a result.
            EnvironmentFailure: the server is lost.
        """
        try:
            result = await self._request(self._client.call_tool(name, dict(arguments)))
        except ToolError as error:
            if (result := complete_result(error.__cause__)) is None:
                raise
        if result.is_error:
            raise ToolError(result_text(result) or f"{name} failed")
        return result

    async def _request(self, request: Any) -> Any:
        """Await a request; turn its errors into `ToolError` or, if the session is lost, `EnvironmentFailure`."""
        mcp_error, invalid = EXTRA.load("mcp").MCPError, EXTRA.load("pydantic").ValidationError
        try:
            return await request
        except AgentRLError:
            raise
        except mcp_error as error:
            if not self._means_lost(error.error):
                raise ToolError(error_text(error.error)) from error
            failure = error
        except invalid as error:
            raise ToolError(f"the server's answer is not valid: {first_problem(error)}") from error
        except Exception as error:  # the package and its transports may raise anything: the session is lost
            failure = error
        self._is_lost = True
        got, hint = _innermost(failure), self._last_errors()
        raise EnvironmentFailure(f"the MCP server {self._address} failed", got=got, hint=hint) from failure

    def _means_lost(self, error: Any) -> bool:
        """Return True if an error comes from the transport, not from the server."""
        if self._is_remote and (error.code in _LOST or (error.code, error.message) == _HTTP_ERROR):
            return True
        return bool(error.code == _LOST[0] and error.message == _CLOSED)


async def _accept_result(name: str, result: Any) -> None:
    """Accept a result without checking it against the output schema."""


class MCPConnection:
    """Connection in its own task, because a client of the `mcp` package must be left in the task that entered it."""

    def __init__(self, connect: Callable[[Any], Any], address: str, *, is_remote: bool) -> None:
        self._connect = connect
        self._address = address
        self._is_remote = is_remote
        self._leave = asyncio.Event()

    async def __aenter__(self) -> Session:
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(ready), name=f"MCP {self._address}")
        self._owner.add_done_callback(lambda task: task.cancelled() or task.exception())  # `Session` reports it
        try:
            async with asyncio.timeout(MCP_START_S):
                client = await ready
        except BaseException as error:
            self._owner.cancel()
            await asyncio.wait({self._owner}, timeout=MCP_STOP_S)
            if isinstance(error, TimeoutError):
                got = f"no answer in {MCP_START_S:g} s"
                raise EnvironmentFailure(f"the MCP server {self._address} does not start", got=got) from error
            raise
        return Session(
            client,
            self._address,
            self._owner,
            is_remote=self._is_remote,
            last_errors=lambda: _quote_errors(self._errors),
        )

    async def __aexit__(self, *error: object) -> None:
        self._leave.set()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._owner, MCP_START_S)

    async def _own(self, ready: asyncio.Future[Any]) -> None:
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            self._errors = errors
            try:
                async with self._connect(errors) as client:
                    ready.set_result(client)
                    await self._leave.wait()
            except Exception as error:  # reported by `__aenter__`, or else by the owner's task
                if ready.done():
                    raise
                what = f"the MCP server {self._address} does not start"
                ready.set_exception(EnvironmentFailure(what, got=_innermost(error), hint=_quote_errors(errors)))


def _quote_errors(errors: Any) -> str | None:
    """Quote the end of a server's standard error; ``None`` if it is empty or already closed."""
    if errors.closed:
        return None
    size = os.fstat(errors.fileno()).st_size
    text = os.pread(errors.fileno(), MAX_QUOTE_LENGTH, max(0, size - MAX_QUOTE_LENGTH)).decode(errors="replace").strip()
    return f"it wrote: {text}" if text else None


def _innermost(error: BaseException) -> str:
    """Describe the first error within exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
