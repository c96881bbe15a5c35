"""Sessions of clients, each with an environment of its own: what a request does, and how errors are answered.

Requests can be repeated: each has a number, and each is carried out once. An abandoned session is closed when its lease
is over.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from agentrl.errors import (
    AgentRLError,
    EnvironmentFailure,
    ToolError,
    UsageError,
    async_boundary,
)
from agentrl.remote.env_methods import CALL_TOOL, RESET, STEP, EnvMethod, ResetResult
from agentrl.remote.wire import Body, Problem, Refusal, to_json
from agentrl.rollout.env_adapter import call_own_tool
from agentrl.rollout.env_pool import EnvHandle, EnvPool
from agentrl.task import Task
from agentrl.tool import Tool, ToolResult


def problem_of(error: Exception) -> Problem:
    """Tell what an error is about, for the client."""
    match error:
        case Refusal():
            return error.problem
        case ToolError():
            return Problem.TOOL
        case UsageError():
            return Problem.USAGE
        case _:
            return Problem.ENVIRONMENT


def message_of(error: Exception) -> str:
    """Return an error's text: our own say everything, others need their type's name."""
    return str(error) if isinstance(error, Refusal | AgentRLError) else f"{type(error).__name__}: {error}"


def is_fatal(error: Exception) -> bool:
    """True if the environment may be broken, and must not be used for another episode."""
    return isinstance(error, EnvironmentFailure) or not isinstance(error, Refusal | AgentRLError)


Clock: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ServerReply:
    """Status and body of an answer."""

    status: int
    body: bytes


def error_answer(error: Exception) -> ServerReply:
    """Make the answer of an error."""
    problem = problem_of(error)
    return ServerReply(problem.status, to_json({"error": {"kind": problem, "message": message_of(error)}}))


class Session:
    """A borrowed environment.

    Args:
        handle: The environment.
        stack: Gives it back.
        tool_timeout_s: Deadline of a call of one of its tools.
        clock: Seconds, for the lease.
    """

    def __init__(self, handle: EnvHandle, stack: AsyncExitStack, *, tool_timeout_s: float, clock: Clock) -> None:
        self._handle = handle
        self._tool_timeout_s = tool_timeout_s
        self._tools: Mapping[str, Tool] = {}
        """The tools of the current episode."""
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
        """Seconds since the last request was answered; 0 while one is carried out."""
        return 0.0 if self._work is not None and not self._work.done() else self._clock() - self._used_at

    async def answer(self, number: int, request: bytes, do: Callable[[], Awaitable[dict[str, Any]]]) -> ServerReply:
        """Carry out a request, or give the answer that its first sending got.

        Args:
            number: One more than that of the request before, or the same for a repetition.
            request: Its bytes: a repetition has the same.
            do: Carries it out.

        Raises:
            Refusal: the number is wrong.
        """
        checksum = hashlib.sha256(request).digest()
        if number == self._number and self._work is not None:
            if checksum != self._request:
                raise Refusal(Problem.NUMBER, f"number {number} was another request before, and this is none like it")
            return await asyncio.shield(self._work)
        if number != self._number + 1:
            expected = f"{self._number + 1}, or {self._number} to repeat the last one" if self._number else "1"
            raise Refusal(Problem.NUMBER, f"the request has number {number}, expected {expected}")
        before, self._number, self._request = self._work, number, checksum
        self._work = asyncio.create_task(self._carry_out(before, do))
        return await asyncio.shield(self._work)

    async def perform(self, method: EnvMethod[..., Any], body: Body) -> dict[str, Any]:
        """Call a method of the environment.

        Args:
            method: One that is served.
            body: The request, with the arguments.

        Raises:
            Refusal: an argument is missing or of another type.
            EnvironmentFailure: the environment failed.
        """
        arguments = method.read_arguments(body)
        own = self._own.get(method.name)
        result = await (self._handle.call(method, *arguments) if own is None else own(*arguments))
        return method.result.write(result)

    async def close(self) -> None:
        """Give the environment back; one that failed, or is still at work, is thrown away."""
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait({self._work})
            self._failure = RuntimeError("closed in the middle of a request")
        if self._failure is None:
            await self._stack.aclose()
        else:
            await self._stack.__aexit__(type(self._failure), self._failure, None)

    async def _reset(self, seed: int | None, options: Mapping[str, Any]) -> ResetResult:
        # without a seed the environment goes on with its own generator, as Gymnasium's reset(seed=None) does
        task = Task(id=f"seed {seed}", environment="", seed=cast("int", seed), options=options)
        result = await self._handle.reset(task)
        self._tools = {tool.name: tool for tool in result.tools}
        return result

    async def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        if name not in self._tools:
            raise ToolError(f"there is no tool {name!r}", expected=", ".join(self._tools) or "none")
        async with async_boundary(EnvironmentFailure, f"tool {name}", deadline_s=self._tool_timeout_s):
            return await call_own_tool(self._tools[name], arguments)

    async def _carry_out(
        self, before: asyncio.Task[ServerReply] | None, do: Callable[[], Awaitable[dict[str, Any]]]
    ) -> ServerReply:
        if before is not None:
            await asyncio.wait({before})
        try:
            return ServerReply(200, to_json(await do()))
        except Exception as error:  # whatever it is, the client must hear of it
            if is_fatal(error):
                self._failure = error
            return error_answer(error)
        finally:
            self._used_at = self._clock()


class Sessions:
    """Opens, finds and closes sessions.

    Args:
        pool: Lends environments; as many as there may be sessions.
        most: Most sessions at once.
        lease_s: Seconds without a request after which a session is closed.
        tool_timeout_s: Deadline of a call of an environment's tool.
        clock: Seconds.
    """

    def __init__(self, pool: EnvPool, *, most: int, lease_s: float, tool_timeout_s: float, clock: Clock) -> None:
        self._pool = pool
        self._most = most
        self._lease_s = lease_s
        self._tool_timeout_s = tool_timeout_s
        self._clock = clock
        self._sessions: dict[str, asyncio.Task[Session]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    async def open(self, name: str) -> None:
        """Open a session, unless there is one of this name already.

        Raises:
            Refusal: there is no room.
            EnvironmentFailure: the environment cannot be made.
        """
        if name not in self._sessions:
            if len(self._sessions) >= self._most:
                raise Refusal(Problem.BUSY, f"all {self._most} sessions are taken")
            self._sessions[name] = asyncio.create_task(self._begin(name))
        opening = self._sessions[name]
        try:
            await asyncio.shield(opening)
        except Exception:
            if self._sessions.get(name) is opening:
                del self._sessions[name]
            raise

    def find(self, name: str) -> Session:
        """Find an open session.

        Raises:
            Refusal: there is none of this name.
        """
        opened = self._sessions.get(name)
        if opened is None or not _is_open(opened):
            hint = f"it was closed, or nobody asked it for {self._lease_s:g} s, or the server was started again"
            raise Refusal(Problem.SESSION, f"there is no session {name}: {hint}")
        return opened.result()

    def end(self, name: str) -> None:
        """Close a session soon; one that is not there is closed already."""
        opened = self._sessions.pop(name, None)
        if opened is not None:
            closing = asyncio.create_task(_close(opened))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def expire(self) -> None:
        """Close the sessions whose lease is over."""
        for name, opened in list(self._sessions.items()):
            if _is_open(opened) and opened.result().idle_s > self._lease_s:
                self.end(name)

    async def close(self) -> None:
        """Close all sessions."""
        for name in list(self._sessions):
            self.end(name)
        while self._closing:
            await asyncio.wait(set(self._closing))

    async def _begin(self, name: str) -> Session:
        stack = AsyncExitStack()
        handle = await stack.enter_async_context(self._pool.borrow(f"session {name[:8]}"))
        return Session(handle, stack, tool_timeout_s=self._tool_timeout_s, clock=self._clock)


def _is_open(opened: asyncio.Task[Session]) -> bool:
    """True if a session is there: it is not still being opened, and its opening did not fail."""
    return opened.done() and not opened.cancelled() and opened.exception() is None


async def _close(opened: asyncio.Task[Session]) -> None:
    if not opened.done():
        await asyncio.wait({opened})
    if _is_open(opened):
        await opened.result().close()
