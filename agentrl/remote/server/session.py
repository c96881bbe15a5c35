"""Client sessions, each with its own environment: execution of requests, errors, leases.

Requests may be retried: each has a number and is executed once. An abandoned session is closed when its lease expires.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from agentrl.errors import AgentRLError, EnvironmentFailure, ToolError, UsageError
from agentrl.errors.deadlines import async_boundary
from agentrl.errors.foreign import await_or_abandon
from agentrl.remote.env_methods import CALL_TOOL, RESET, STEP, EnvMethod, ResetResult
from agentrl.remote.wire import Body, Refusal, RefusalKind, to_json
from agentrl.rollout.env_pool import EnvHandle
from agentrl.rollout.env_workers import call_own_tool
from agentrl.task import Task
from agentrl.tool import Tool, ToolResult

_NAME = re.compile(r"[\w-]{8,64}", re.ASCII)
Clock: TypeAlias = Callable[[], float]
SWEEPS_PER_LEASE = 10


def refusal_kind(error: Exception) -> RefusalKind:
    """Return the kind of an error for the client."""
    match error:
        case Refusal():
            return error.kind
        case ToolError():
            return RefusalKind.TOOL
        case UsageError():
            return RefusalKind.USAGE
        case _:
            return RefusalKind.ENVIRONMENT


def message_of(error: Exception) -> str:
    """Return an error's text; for errors from outside agentrl, with the name of the type."""
    return str(error) if isinstance(error, Refusal | AgentRLError) else f"{type(error).__name__}: {error}"


def is_fatal(error: Exception) -> bool:
    """Return True if the environment may be broken and must not be reused."""
    return isinstance(error, EnvironmentFailure) or not isinstance(error, Refusal | AgentRLError)


async def call_own_tool_in_time(
    tools: Mapping[str, Tool], name: str, arguments: Mapping[str, Any], timeout_s: float
) -> ToolResult:
    """Call one of an environment's tools; abandon a call that takes too long.

    Raises:
        ToolError: the tool is unknown, the arguments are wrong, or the tool failed.
        EnvironmentFailure: the environment is lost, or the call takes too long.
    """
    if name not in tools:
        raise ToolError(f"unknown tool {name!r}", expected=", ".join(tools) or "none")
    async with async_boundary(EnvironmentFailure, f"tool {name}", deadline_s=timeout_s):
        return await await_or_abandon(call_own_tool(tools[name], arguments), f"tool {name}")


@dataclass(frozen=True, slots=True)
class ServerReply:
    """Status and body of an answer."""

    status: int
    body: bytes


def error_answer(error: Exception) -> ServerReply:
    """Return the answer for an error."""
    kind = refusal_kind(error)
    return ServerReply(kind.status, to_json({"error": {"kind": kind, "message": message_of(error)}}))


class Session:
    """One client's session with a borrowed environment."""

    def __init__(self, handle: EnvHandle, stack: AsyncExitStack, *, tool_timeout_s: float, clock: Clock) -> None:
        self._handle = handle
        self._tool_timeout_s = tool_timeout_s
        self._tools: Mapping[str, Tool] = {}
        """Tools of the current episode."""
        self._own: Mapping[str, Callable[..., Awaitable[Any]]] = {
            RESET.name: self._reset,
            STEP.name: handle.step,
            CALL_TOOL.name: self._call_tool,
        }
        self._stack = stack
        self._clock = clock
        self._number = 0
        self._request = b""
        self._work: asyncio.Task[ServerReply] | None = None
        self._failure: Exception | None = None
        self._used_at = clock()

    @property
    def idle_s(self) -> float:
        """Seconds since the last request was answered; 0 while one is running."""
        return 0.0 if self._work is not None and not self._work.done() else self._clock() - self._used_at

    async def answer(self, number: int, request: bytes, do: Callable[[], Awaitable[dict[str, Any]]]) -> ServerReply:
        """Execute a request, or return the answer of the request that it retries.

        Args:
            number: The previous request's number plus one, or the same number for a retry.
            request: Bytes of the request, which a retry repeats.
            do: Executes the request.

        Raises:
            Refusal: the number is wrong.
        """
        checksum = hashlib.sha256(request).digest()
        if number == self._number and self._work is not None:
            if checksum != self._request:
                raise Refusal(RefusalKind.NUMBER, f"number {number} was used for a different request")
            return await asyncio.shield(self._work)
        if number != self._number + 1:
            expected = f"{self._number + 1}, or {self._number} to repeat the last one" if self._number else "1"
            raise Refusal(RefusalKind.NUMBER, f"the request has number {number}, expected {expected}")
        before, self._number, self._request = self._work, number, checksum
        self._work = asyncio.create_task(self._carry_out(before, do))
        return await asyncio.shield(self._work)

    async def perform(self, method: EnvMethod[..., Any], body: Body) -> dict[str, Any]:
        """Call a method of the environment that `is_served`, with the arguments in the JSON of the request.

        Raises:
            Refusal: an argument is missing or has another type.
            EnvironmentFailure: the environment failed.
        """
        arguments = method.read_arguments(body)
        own = self._own.get(method.name)
        result = await (self._handle.call(method, *arguments) if own is None else own(*arguments))
        return method.result.write(result)

    async def close(self) -> None:
        """Return the environment to the pool, which discards it if it failed or is still executing a request."""
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait({self._work})
            self._failure = RuntimeError("the session was closed during a request")
        if self._failure is None:
            await self._stack.aclose()
        else:
            await self._stack.__aexit__(type(self._failure), self._failure, None)

    async def _reset(self, seed: int | None, options: Mapping[str, Any]) -> ResetResult:
        # Without a seed the environment keeps its random generator, as in Gymnasium's reset(seed=None).
        task = Task(id=f"seed {seed}", environment="", seed=cast("int", seed), options=options)
        result = await self._handle.reset(task)
        self._tools = {tool.name: tool for tool in result.tools}
        return result

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return await call_own_tool_in_time(self._tools, name, arguments, self._tool_timeout_s)

    async def _carry_out(
        self, before: asyncio.Task[ServerReply] | None, do: Callable[[], Awaitable[dict[str, Any]]]
    ) -> ServerReply:
        if before is not None:
            await asyncio.wait({before})
        try:
            return ServerReply(200, to_json(await do()))
        except Exception as error:  # the client receives every error
            if is_fatal(error):
                self._failure = error
            return error_answer(error)
        finally:
            self._used_at = self._clock()


class Leasable(Protocol):
    """A resource that a client can lease."""

    @property
    def idle_s(self) -> float:
        """Seconds since the last request was answered; 0 while one is running."""

    async def close(self) -> None:
        """Release the resource."""


L = TypeVar("L", bound=Leasable)


class Leases(Generic[L]):
    """Leased resources by the names that clients chose; a resource is closed after `lease_s` without a request.

    Args:
        noun: Singular and plural of the resource, for error messages.
        most: Maximum number of open resources.
        lease_s: Seconds without a request after which a resource is closed.
        kept_names: Number of latest closed names that cannot be opened again.
    """

    def __init__(self, noun: tuple[str, str], *, most: int, lease_s: float, kept_names: int = 0) -> None:
        self._noun, self._nouns = noun
        self._most = most
        self._lease_s = lease_s
        self._opened: dict[str, asyncio.Task[L]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._ended: deque[str] = deque(maxlen=kept_names)
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._opened)

    def check_name(self, name: str) -> None:
        """Check the name of a resource that is to be opened.

        Raises:
            Refusal: the name is invalid, or its resource was closed.
        """
        if not _NAME.fullmatch(name):
            expected = "expected 8 to 64 letters, digits, - or _"
            raise Refusal(RefusalKind.REQUEST, f"{name[:80]!r} is not a valid name of a {self._noun}: {expected}")
        if name in self._ended:  # the client closed it before the answer to its opening
            raise Refusal(RefusalKind.SESSION, f"the {self._noun} {name} was closed")

    async def open(self, name: str, begin: Callable[[], Coroutine[Any, Any, L]]) -> L:
        """Return the resource with this name; `begin` opens a missing one.

        Raises:
            Refusal: the maximum number of resources is open.
            Exception: any error of `begin`.
        """
        if name not in self._opened:
            if len(self._opened) >= self._most:
                raise Refusal(RefusalKind.BUSY, f"all {self._most} {self._nouns} are in use")
            self._opened[name] = asyncio.create_task(begin())
        opening = self._opened[name]
        try:
            return await asyncio.shield(opening)
        except Exception:
            if self._opened.get(name) is opening:
                del self._opened[name]
            raise

    def find(self, name: str) -> L:
        """Return the open resource with this name.

        Raises:
            Refusal: no such resource is open.
        """
        opened = self._opened.get(name)
        if opened is None or not _is_open(opened):
            hint = f"it was closed, was idle for {self._lease_s:g} s, or the server restarted"
            raise Refusal(RefusalKind.SESSION, f"no {self._noun} {name} is open: {hint}")
        return opened.result()

    def end(self, name: str) -> None:
        """Close a resource in the background; a name that is not open is ignored."""
        if name not in self._ended:
            self._ended.append(name)
        opened = self._opened.pop(name, None)
        if opened is not None:
            closing = asyncio.create_task(_close(opened))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def expire(self) -> None:
        """Close all resources whose lease has expired."""
        for name, opened in list(self._opened.items()):
            if _is_open(opened) and opened.result().idle_s > self._lease_s:
                self.end(name)

    def start_expiring(self) -> None:
        """Call `expire` periodically until `close`."""
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Close all resources; idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        for name in list(self._opened):
            self.end(name)
        while self._closing:
            await asyncio.wait(set(self._closing))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / SWEEPS_PER_LEASE)
            self.expire()


def _is_open(opened: asyncio.Task[L]) -> bool:
    """Return True if opening has finished without an error."""
    return opened.done() and not opened.cancelled() and opened.exception() is None


async def _close(opened: asyncio.Task[L]) -> None:
    if not opened.done():
        await asyncio.wait({opened})
    if _is_open(opened):
        await opened.result().close()
