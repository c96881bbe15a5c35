"""The tools of one episode: opened when first called, called within their limits, closed at the end."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.agent_loop import EpisodeEnd
from agentrl.errors import AgentRLError, EnvironmentFailure, SandboxError, ToolError, UsageError, async_boundary
from agentrl.message import ToolCall
from agentrl.rollout.stall import WaitKind
from agentrl.rollout.tool_desk import ToolDesk
from agentrl.rollout.turns import TurnLog
from agentrl.sandbox import Sandbox
from agentrl.tool import Provisions, Tool, ToolContext, ToolResult
from agentrl.tool_arguments import WrongArguments, refuse_depth
from agentrl.tool_fault import ToolFault, contained, ended_in_time

T = TypeVar("T")
SANDBOX_START_S = 120.0
"""Deadline of a sandbox that starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """How a call of a tool went."""

    tool: Tool | None
    """``None``: there is no tool of that name."""
    result: ToolResult
    failed: bool = False
    """The policy reads an error."""
    was_kept: bool = False
    """The tool said it before, and was not asked again."""
    seconds: float = 0.0
    cause: BaseException | None = None
    """What the tool raised, where it failed itself."""


class EpisodeTools:
    """Opens, calls and closes.

    Args:
        turns: The episode's turns and budgets.
        desk: What all episodes share.
        make_sandbox: Makes the episode's sandbox; ``None`` when no config asks for one.
        task_id: Of the episode's task.
        seed: Of the episode's task.
        act: Takes an action in the environment.
    """

    def __init__(
        self,
        turns: TurnLog,
        desk: ToolDesk,
        *,
        make_sandbox: Callable[[], Sandbox] | None,
        task_id: str,
        seed: int,
        act: Callable[[str], Awaitable[str]],
    ) -> None:
        self.task_id = task_id
        self.seed = seed
        self.act = act
        self._turns = turns
        self._desk = desk
        self._make_sandbox = make_sandbox
        self._sandbox: Sandbox | None = None
        self._stack = AsyncExitStack()
        self._bound: dict[str, Callable[..., Any]] = {}
        self._shared: dict[Hashable, Any] = {}
        self._opening = asyncio.Lock()
        self._sharing = asyncio.Lock()

    async def carry_out(self, call: ToolCall, tools: Mapping[str, Tool]) -> Called:
        """Call a tool; what the policy can mend is the result's text.

        Raises:
            EpisodeEnd: the episode's time is over.
            InfrastructureError: the machinery failed.
        """
        clock = self._turns.recorders.waits.clock
        began, tool = clock(), tools.get(call.name)
        try:
            if tool is None:
                raise _unknown(call.name, tools)
            checked = _checked(tool, call.arguments)
            kept = self._desk.find(tool, checked)
            result = kept or await self._call(tool, checked)
            if kept is None:
                self._desk.keep(tool, checked, result)
        except ToolError as error:
            text, seconds = f"Error: {error}", clock() - began
            return Called(tool=tool, result=ToolResult(text), failed=True, seconds=seconds, cause=error.__cause__)
        return Called(tool=tool, result=result, was_kept=kept is not None, seconds=clock() - began)

    async def _call(self, tool: Tool, checked: Mapping[str, Any]) -> ToolResult:
        """Wait for the tool's turn, then call it within its deadline."""
        trajectory_id, waits = self._turns.trajectory.id, self._turns.recorders.waits
        if tool.needs_sandbox:
            await self._start_sandbox(tool.name)
        async with AsyncExitStack() as place:
            if (gate := self._desk.gate(tool)) is not None:
                with waits.on(WaitKind.CAPACITY, trajectory_id, f"a free place for the tool {tool.name}"):
                    await place.enter_async_context(gate.passed())
            with waits.on(WaitKind.TOOL, trajectory_id, tool.name):
                return await self._call_in_time(tool, checked)

    async def _call_in_time(self, tool: Tool, checked: Mapping[str, Any]) -> ToolResult:
        limit = tool.rules.timeout_s or self._turns.limits.tool_timeout_s
        if tool.open_deadline_s is not None:
            async with async_boundary(EnvironmentFailure, f"opening {tool.name}", deadline_s=tool.open_deadline_s):
                await self._open(tool, limit)
        remaining = self._turns.budget.remaining_s
        deadline = asyncio.timeout(limit if remaining is None else min(limit, max(remaining, 0)))
        try:
            async with deadline:
                with contained():
                    running = tool.run(await self._open(tool, limit), checked)
                    return await (running if tool.rules.inline else ended_in_time(running))
        except (AgentRLError, EpisodeEnd):
            raise
        except Exception as error:
            if deadline.expired():
                self._turns.budget.check_time()
            cause = error.cause if isinstance(error, ToolFault) else error
            failed = f"did not answer in {limit:g} s" if deadline.expired() else f"failed ({type(cause).__name__})"
            raise ToolError(f"{tool.name} {failed}") from cause

    async def _open(self, tool: Tool, limit_s: float) -> Callable[..., Any]:
        if tool.name in self._bound:
            return self._bound[tool.name]
        async with self._opening:
            if tool.name not in self._bound:
                context = EpisodeContext(self, limit_s)
                provisions = Provisions(context=context, sandbox=self._sandbox)
                self._bound[tool.name] = await tool.open(self._stack, provisions)
        return self._bound[tool.name]

    async def share(self, key: Hashable, make: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """See `ToolContext.shared`."""
        async with self._sharing:
            if key not in self._shared:
                self._shared[key] = await self._stack.enter_async_context(make())
        shared: T = self._shared[key]
        return shared

    async def _start_sandbox(self, tool: str) -> None:
        """Start the episode's sandbox, if it was not started yet.

        Raises:
            UsageError: no config asks for one.
            SandboxError: it does not start.
        """
        async with self._opening:
            if self._sandbox is not None:
                return
            if self._make_sandbox is None:
                hint = "set agent.sandbox={type: local}, or --sandbox local where a tool is called by hand"
                raise UsageError(f"tool {tool} needs a sandbox, and there is none", hint=hint)
            waits, trajectory_id = self._turns.recorders.waits, self._turns.trajectory.id
            with waits.on(WaitKind.TOOL, trajectory_id, "a sandbox"):
                async with async_boundary(SandboxError, "starting a sandbox", deadline_s=SANDBOX_START_S):
                    sandbox = self._make_sandbox()
                    self._stack.push_async_callback(sandbox.close)  # before it starts: half of one is closed, too
                    await sandbox.start()
            self._sandbox = sandbox

    async def close(self) -> None:
        """Close what was opened, the last first."""
        await self._stack.aclose()


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
        """What tools of the episode share."""
        return await self._tools.share(key, make)


def batches(calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> Iterator[list[ToolCall]]:
    """Calls that may run together, in the order of the answer: neighbours whose tools are all parallel."""
    together: list[ToolCall] = []
    for call in calls:
        if call.name in tools and tools[call.name].rules.is_parallel:
            together.append(call)
            continue
        if together:
            yield together
        yield [call]
        together = []
    if together:
        yield together


async def all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What several coroutines give, in their order; where one fails, the others are cancelled and awaited first."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _checked(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, checked by the tool.

    Raises:
        ToolError: they are wrong, or the tool's own checks fail.
    """
    try:
        refuse_depth(arguments)
        return tool.validate(arguments)
    except WrongArguments as error:
        raise ToolError(f"wrong arguments for {tool.name}: {error}") from error
    except AgentRLError:
        raise
    except Exception as error:
        raise ToolError(f"{tool.name} cannot check its arguments ({type(error).__name__})") from error


def _unknown(name: str, tools: Mapping[str, Tool]) -> ToolError:
    near = difflib.get_close_matches(name, tools, n=1)
    hint = f"did you mean {near[0]}?" if near else None
    return ToolError(f"there is no tool {name!r}", expected=", ".join(tools), hint=hint)
