"""Tools of an episode, opened at the first call and closed at the end, and limits shared by all episodes."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import json
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

from agentrl.agent_loop import EpisodeEnd
from agentrl.errors import (
    AgentRLError,
    EnvironmentFailure,
    SandboxError,
    SourceLocation,
    ToolError,
    UsageError,
    described_error,
    is_addressed_to,
    raised_at,
    raised_in,
    running_task,
)
from agentrl.errors.deadlines import async_boundary
from agentrl.errors.foreign import await_or_abandon, cancel_or_abandon, cause_of, foreign_result, start_foreign_task
from agentrl.message import ToolCall
from agentrl.reward import defined_in
from agentrl.rollout.budget import EpisodeLimits
from agentrl.rollout.events import RolloutCounters, RolloutObserver
from agentrl.rollout.turns import TurnLog
from agentrl.rollout.waits import WaitKind, WaitTracker
from agentrl.sandbox import Sandbox, open_sandbox
from agentrl.tool import Tool, ToolContext, ToolDependencies, ToolResult, Toolset
from agentrl.tool.schema import WrongArguments, refuse_depth
from agentrl.trajectory import Trajectory

_log = logging.getLogger(__name__)

MAX_CACHED_RESULTS = 4096
"""Maximum number of cached results of one pure tool; the least recently used one is dropped."""


class RateLimiter:
    """Rate limiter of one tool.

    It admits at most `max_concurrent` calls at a time, which begin at least ``1 / max_per_second`` seconds apart.
    """

    def __init__(
        self,
        max_concurrent: int | None,
        max_per_second: float | None,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._free_slots = contextlib.nullcontext() if max_concurrent is None else asyncio.Semaphore(max_concurrent)
        self._interval_s = 0.0 if max_per_second is None else 1 / max_per_second
        self._next = clock()
        self._clock = clock
        self._sleep = sleep

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Wait until a call may begin; the block is the call."""
        async with self._free_slots:
            if self._interval_s:
                now = self._clock()
                begins = max(now, self._next)
                self._next = begins + self._interval_s
                if begins > now:
                    await self._sleep(begins - now)
            yield


class ToolLimits:
    """Rate limits, cached results and reported faults of tools, shared by all episodes of a run."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = _log.warning,
    ) -> None:
        self._clock = clock
        self._rate_limiters: dict[tuple[str, int | None, float | None], RateLimiter] = {}
        self._cached: WeakKeyDictionary[Tool, OrderedDict[str, ToolResult]] = WeakKeyDictionary()
        self._say = say
        self._reported: set[str] = set()

    def rate_limiter(self, tool: Tool) -> RateLimiter | None:
        """Return the rate limiter of a tool; ``None`` if it has no limits."""
        limits = (tool.rules.max_concurrent, tool.rules.max_per_second)
        if limits == (None, None):
            return None
        key = (tool.name, *limits)
        if key not in self._rate_limiters:
            self._rate_limiters[key] = RateLimiter(*limits, self._clock)
        return self._rate_limiters[key]

    def cached_result(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult | None:
        """Return the cached result of a pure tool for these arguments; ``None`` if there is none."""
        if not tool.rules.pure:
            return None
        cached = self._cached.get(tool, OrderedDict())
        key = _key(arguments)
        if key in cached:
            cached.move_to_end(key)
        return cached.get(key)

    def cache_result(self, tool: Tool, arguments: Mapping[str, Any], result: ToolResult) -> None:
        """Cache the result of a pure tool; results of other tools are ignored."""
        if not tool.rules.pure:
            return
        cached = self._cached.setdefault(tool, OrderedDict())
        cached[_key(arguments)] = result
        if len(cached) > MAX_CACHED_RESULTS:
            cached.popitem(last=False)

    def report_fault(self, tool: Tool, error: BaseException) -> None:
        """Report a tool's exception to the user, once per source line; the policy reads only that the tool failed."""
        location = _location_of(tool, error)
        if location is not None and location not in self._reported:
            self._reported.add(location)
            self._say(f"tool {tool.name} failed: {described_error(error)}; {location}")


def _location_of(tool: Tool, error: BaseException) -> str | None:
    """Describe where a tool raised in the file that defines it; ``None`` if it is defined elsewhere (on a server)."""
    target = getattr(tool, "target", None)
    defined = None if target is None else defined_in(target)
    return None if defined is None else raised_in(error, defined.file)


def _key(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True, default=repr)


T = TypeVar("T")
NO_RESOURCES = AsyncExitStack()
"""Stack for tools that open nothing."""
Opening: TypeAlias = "Callable[[AsyncExitStack], Awaitable[Any]]"
SANDBOX_START_S = 120.0
TOOLSET_S = 120.0
"""Deadline for a toolset to list its tools; on the first call it may start a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallResult:
    """Result of one call of a tool, with its seconds."""

    tool: Tool | None
    """Called tool; ``None`` if there is no tool of that name."""
    result: ToolResult
    failed: bool = False
    was_cached: bool = False
    """True if the result was cached by an earlier call."""
    seconds: float = 0.0
    cause: BaseException | None = None
    """Exception of the tool itself; ``None`` if it raised none."""

    @property
    def own_error(self) -> tuple[str | None, SourceLocation | None]:
        """Description of the tool's own exception, and its line in the file that defines the tool.

        Wrong arguments and errors that the tool raises for the model to read do not count.
        """
        if self.tool is None or self.cause is None or isinstance(self.cause, WrongArguments):
            return None, None
        defined = defined_in(self.tool.target)
        raised = None if defined is None else raised_at(self.cause, defined.file)
        return described_error(self.cause), raised or raised_at(self.cause)

    @property
    def fault(self) -> str | None:
        """Description of the cause and its location, for the user."""
        if self.tool is None or self.cause is None:
            return None
        location = _location_of(self.tool, self.cause)
        return described_error(self.cause) + (f"; {location}" if location else "")


CallTool: TypeAlias = Callable[[ToolCall, Mapping[str, Tool]], Coroutine[Any, Any, ToolCallResult]]
"""Function that calls one of an episode's tools; see `EpisodeTools.carry_out`."""


class EpisodeTools:
    """Tools of one episode: opens, calls and closes them.

    Args:
        configured: Tools of the config. The environment's own tools come with its reset.
        turns: Log and budget of the episode.
        tool_limits: Limits that all episodes share.
        make_sandbox: Makes the sandbox of the tools; without it, no tool can use one.
    """

    def __init__(
        self,
        configured: Sequence[Tool],
        turns: TurnLog,
        tool_limits: ToolLimits,
        *,
        make_sandbox: Callable[[], Sandbox] | None,
    ) -> None:
        self.configured = {tool.name: tool for tool in configured}
        self.task_id = turns.trajectory.task_id
        self.seed = turns.trajectory.seed
        self.act: Callable[[str], Awaitable[str]] = _no_environment
        """Takes an action in the environment; set by the episode."""
        self._turns = turns
        self._tool_limits = tool_limits
        self._make_sandbox = make_sandbox
        self._sandbox: Sandbox | None = None
        self._owner = ResourceOwner(f"the tools of {turns.trajectory.id}")
        self._bound: dict[str, Callable[..., Any]] = {}
        self._shared: dict[Hashable, Any] = {}
        self._opening = asyncio.Lock()
        self._sharing = asyncio.Lock()

    async def carry_out(self, call: ToolCall, tools: Mapping[str, Tool]) -> ToolCallResult:
        """Call a tool; errors that the policy can fix become the result's text.

        Raises:
            EpisodeEnd: the episode's time is over.
            InfrastructureError: the infrastructure failed.
        """
        clock = self._turns.waits.clock
        began, tool = clock(), tools.get(call.name)
        try:
            if tool is None:
                raise _unknown_tool(call.name, tools)
            checked = _check_arguments(tool, call.arguments)
            cached = self._tool_limits.cached_result(tool, checked)
            result = cached or await self._call(tool, checked)
            if cached is None:
                self._tool_limits.cache_result(tool, checked, result)
        except ToolError as error:
            text, seconds = f"Error: {str(error).strip() or f'{call.name} failed, without a reason'}", clock() - began
            return ToolCallResult(
                tool=tool, result=ToolResult(text), failed=True, seconds=seconds, cause=error.__cause__
            )
        return ToolCallResult(tool=tool, result=result, was_cached=cached is not None, seconds=clock() - began)

    async def _call(self, tool: Tool, checked: Mapping[str, Any]) -> ToolResult:
        trajectory_id, waits = self._turns.trajectory.id, self._turns.waits
        if tool.needs_sandbox:
            await self._start_sandbox(tool.name)
        async with AsyncExitStack() as slot:
            if (limiter := self._tool_limits.rate_limiter(tool)) is not None:
                with waits.on(WaitKind.CAPACITY, trajectory_id, f"a free slot of the tool {tool.name}"):
                    await slot.enter_async_context(limiter.admit())
            with waits.on(WaitKind.TOOL, trajectory_id, tool.name, self._limit_s(tool)):
                return await self._call_in_time(tool, checked)

    async def _call_in_time(self, tool: Tool, checked: Mapping[str, Any]) -> ToolResult:
        limit = self._limit_s(tool)
        if tool.open_deadline_s is not None:
            async with async_boundary(EnvironmentFailure, f"opening {tool.name}", deadline_s=tool.open_deadline_s):
                await self._open(tool, limit)
        remaining = self._turns.budget.remaining_s
        deadline = asyncio.timeout(limit if remaining is None else min(limit, max(remaining, 0)))
        caller = running_task()
        try:
            async with deadline:
                running = tool.run(await self._open(tool, limit), checked)
                return await (running if tool.rules.inline else await_or_abandon(running, f"tool {tool.name}"))
        except (AgentRLError, EpisodeEnd):
            raise
        except BaseException as error:
            if is_addressed_to(caller, error):
                raise
            if deadline.expired():
                self._turns.budget.check_time()
                raise ToolError(f"{tool.name} did not answer in {limit:g} s") from error
            cause = cause_of(error)
            self._tool_limits.report_fault(tool, cause)
            raise ToolError(f"{tool.name} failed ({type(cause).__name__})") from cause

    def _limit_s(self, tool: Tool) -> float:
        return tool.rules.timeout_s or self._turns.limits.tool_timeout_s

    async def _open(self, tool: Tool, limit_s: float) -> Callable[..., Any]:
        if tool.name in self._bound:
            return self._bound[tool.name]
        async with self._opening:
            if tool.name not in self._bound:
                context = EpisodeContext(self, limit_s)
                provisions = ToolDependencies(context=context, sandbox=self._sandbox)
                opening = functools.partial(tool.open, provisions=provisions)
                has_resources = tool.is_stateful or type(tool).open is not Tool.open
                self._bound[tool.name] = await (self._owner.open(opening) if has_resources else opening(NO_RESOURCES))
        return self._bound[tool.name]

    async def share(self, key: Hashable, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """See `ToolContext.shared`."""
        async with self._sharing:
            if key not in self._shared:
                self._shared[key] = await self._owner.open(lambda stack: stack.enter_async_context(make()))
        shared: T = self._shared[key]
        return shared

    async def _start_sandbox(self, tool: str) -> None:
        async with self._opening:
            if self._sandbox is not None:
                return
            if self._make_sandbox is None:
                hint = "set agent.sandbox={type: local}, or --sandbox local if you call the tool by hand"
                raise UsageError(f"tool {tool} needs a sandbox, but none is configured", hint=hint)
            waits, trajectory_id = self._turns.waits, self._turns.trajectory.id
            with waits.on(WaitKind.TOOL, trajectory_id, "a sandbox", SANDBOX_START_S, "a sandbox that starts"):
                async with async_boundary(SandboxError, "starting a sandbox", deadline_s=SANDBOX_START_S):
                    self._sandbox = await self._owner.open(functools.partial(_open_sandbox, self._make_sandbox))

    async def close(self) -> None:
        """Close everything that was opened, in reverse order."""
        await self._owner.close()


async def _open_sandbox(make: Callable[[], Sandbox], stack: AsyncExitStack) -> Sandbox:
    sandbox = make()
    stack.push_async_callback(sandbox.close)  # a partial start is closed too
    await sandbox.start()
    return sandbox


class ResourceOwner:
    """Task that opens and closes the resources of an episode, as many of them must be closed by the task that opened
    them.

    It starts with the first resource. Like any call of foreign code, it is abandoned if it does not end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stack = AsyncExitStack()
        self._openings: asyncio.Queue[tuple[Opening, asyncio.Future[Any]] | None] = asyncio.Queue()
        self._current: asyncio.Future[Any] | None = None
        self._interrupted = False
        self._task: asyncio.Task[None] | None = None

    async def open(self, opening: Callable[[AsyncExitStack], Awaitable[T]]) -> T:
        """Return the result of `opening`, which enters resources on the stack; it is cancelled with its caller."""
        if self._task is not None and running_task() is self._task:
            return await opening(self._stack)  # an opening that opens another resource
        if self._task is None:
            self._task = start_foreign_task(self._serve(), self._name)
        opened = asyncio.get_running_loop().create_future()
        self._openings.put_nowait((opening, opened))
        try:
            return cast("T", await opened)
        except asyncio.CancelledError:
            if self._current is opened:
                self._interrupted = True
                self._task.cancel()
            raise

    async def _serve(self) -> None:
        async with self._stack:
            while (next_one := await self._next()) is not None:
                opening, self._current = next_one
                await self._carry_out(opening, self._current)
                self._current = None

    async def _next(self) -> tuple[Opening, asyncio.Future[Any]] | None:
        while True:
            try:
                return await self._openings.get()
            except asyncio.CancelledError:
                if not self._was_interrupted():
                    raise

    async def _carry_out(self, opening: Opening, opened: asyncio.Future[Any]) -> None:
        if opened.done():
            return
        try:
            result = await opening(self._stack)
        except BaseException as error:  # the caller gets it
            if is_addressed_to(running_task(), error) and not self._was_interrupted():
                raise
            if not opened.done():
                opened.set_exception(error)
        else:
            if not opened.done():
                opened.set_result(result)

    def _was_interrupted(self) -> bool:
        """Return True if this task was cancelled only to interrupt an opening; the task then continues."""
        was, self._interrupted = self._interrupted, False
        if was and (task := running_task()) is not None:
            task.uncancel()
        return was

    async def close(self) -> None:
        """Close the resources in reverse order of their opening."""
        if self._task is None:
            return
        self._openings.put_nowait(None)
        try:
            await asyncio.wait({self._task})
        except asyncio.CancelledError:
            await cancel_or_abandon(self._task)
            raise
        foreign_result(self._task)


class EpisodeContext(ToolContext):
    """The runtime's `ToolContext`."""

    def __init__(self, tools: EpisodeTools, timeout_s: float) -> None:
        self.task_id = tools.task_id
        self.seed = tools.seed
        self.timeout_s = timeout_s
        self._tools = tools

    async def act(self, action: str) -> str:
        """Take an action in the environment."""
        return await self._tools.act(action)

    async def shared(self, key: Hashable, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """Return a resource that the episode's tools share; `make` opens it on the first call."""
        return await self._tools.share(key, make)


async def list_tools(tools: Sequence[Tool | Toolset]) -> list[Tool]:
    """Return tools and the tools of toolsets; raise a `UsageError` if two have the same name."""

    async def ask(toolset: Toolset) -> Sequence[Tool]:
        async with async_boundary(EnvironmentFailure, "asking for tools", deadline_s=TOOLSET_S):
            return await await_or_abandon(toolset.tools(), f"tools() of {type(toolset).__name__}")

    offered = iter(await gather_in_order([ask(one) for one in tools if not isinstance(one, Tool)]))
    found = [tool for one in tools for tool in ([one] if isinstance(one, Tool) else next(offered))]
    if twice := sorted(name for name, count in Counter(one.name for one in found).items() if count > 1):
        raise UsageError("two tools have the same name", got=", ".join(twice), hint="give one of them a prefix")
    return found


def batches(calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> Iterator[list[ToolCall]]:
    """Yield batches of calls in order; a batch is one call, or adjacent calls of parallel tools."""
    for is_parallel, found in groupby(calls, lambda call: call.name in tools and tools[call.name].rules.is_parallel):
        together = list(found)
        yield from [together] if is_parallel else ([call] for call in together)


async def gather_in_order(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Gather the results of coroutines in order; if one fails, cancel and await the others before raising."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        refuse_depth(arguments)
        return tool.validate(arguments)
    except WrongArguments as error:
        raise ToolError(f"wrong arguments for {tool.name}: {error}") from error
    except AgentRLError:
        raise
    except Exception as error:
        raise ToolError(f"{tool.name} cannot check its arguments ({type(error).__name__})") from error


def _unknown_tool(name: str, tools: Mapping[str, Tool]) -> ToolError:
    near = difflib.get_close_matches(name, tools, n=1)
    hint = f"did you mean {near[0]}?" if near else None
    return ToolError(f"there is no tool {name!r}", expected=", ".join(tools), hint=hint)


NAME = "tool-session"


@asynccontextmanager
async def tool_session(
    *, sandbox: Mapping[str, Any] | str | None = None, timeout_s: float = 30.0
) -> AsyncIterator[EpisodeTools]:
    """Open tools without an environment, for calls by hand.

    `sandbox` is as in ``agent.sandbox``; `timeout_s` is the deadline of calls of tools without their own deadline.
    """
    waits = WaitTracker()
    trajectory = Trajectory(id=NAME, task_id=NAME, environment="none", seed=0, group_id=NAME)
    limits = EpisodeLimits(tool_timeout_s=timeout_s)
    tools = EpisodeTools(
        (),
        TurnLog(trajectory, limits, 0, waits, RolloutCounters(), RolloutObserver()),
        ToolLimits(waits.clock, say=lambda _: None),  # callers read `ToolCallResult.fault`
        make_sandbox=None if sandbox is None else lambda: open_sandbox(sandbox),
    )
    try:
        yield tools
    finally:
        await tools.close()


async def _no_environment(action: str) -> str:
    raise UsageError("the tool needs an environment", got=f"action {action!r}", hint="call the tool in an episode")
