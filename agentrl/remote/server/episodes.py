"""Episodes of an environment for clients of other protocols: tasks by split and index, steps, tool calls, state.

`openenv` and `mcp_server` translate their protocols to these methods. In contrast to `session`, a client chooses a task
rather than a seed and options, a finished episode rejects actions, and the next start after a failure borrows another
environment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from agentrl.env import EnvironmentSpec, StepResult, optional_part
from agentrl.env.lookup import check_split
from agentrl.errors import EnvironmentFailure, UsageError, boundary
from agentrl.message import Content, TextPart
from agentrl.remote.env_methods import RemoteTool, ResetResult
from agentrl.remote.server.server import ServerSettings
from agentrl.remote.server.session import Clock, call_own_tool_in_time, is_fatal
from agentrl.rollout.env_pool import EnvHandle, EnvPool
from agentrl.rollout.environment_probe import probe_environment
from agentrl.task import Task, TaskSource, fetch_tasks
from agentrl.tool import Tool, ToolResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChoice:
    """Task that a client chose to play."""

    split: str | None = None
    """``None``: the first split of the environment."""
    index: int | None = None
    seed: int | None = None
    """Seed that selects the task at this index modulo the number of tasks."""


class ServedTasks:
    """Tasks of an environment by split, loaded when they are first used."""

    def __init__(self, spec: EnvironmentSpec, options: Mapping[str, Any]) -> None:
        self.spec, self._options = spec, options
        self._sources: dict[str, TaskSource] = {}

    def source(self, split: str | None) -> TaskSource:
        """Return the tasks of a split.

        Raises:
            UsageError: the environment has no such split, it is empty, or its data are missing.
            EnvironmentFailure: its tasks cannot be loaded.
        """
        name = check_split(self.spec, split or self.spec.splits[0])
        if name not in self._sources:
            with boundary(EnvironmentFailure, f"loading the tasks of {self.spec.name}/{name}"):
                source = self.spec.tasks_under(name, self._options)
                if not len(source):
                    raise UsageError(f"the split {name} of environment {self.spec.name} has no tasks")
            self._sources[name] = source
        return self._sources[name]

    async def find(self, choice: TaskChoice, *, default: int) -> Task:
        """Return the chosen task; `default` is the seed if the client made no choice.

        Raises:
            UsageError: there is no such task.
            EnvironmentFailure: the tasks cannot be loaded.
        """
        source = self.source(choice.split)
        if choice.index is not None and choice.seed is not None:
            raise UsageError("a task is selected by an index or a seed, not both", got="both", expected="one of them")
        if choice.index is not None and not 0 <= choice.index < len(source):
            raise UsageError("no task has this index", got=choice.index, expected=f"0 to {len(source) - 1}")
        seed = default if choice.seed is None else choice.seed
        index = seed % len(source) if choice.index is None else choice.index
        await fetch_tasks(source, [index])
        with boundary(EnvironmentFailure, f"loading task {index} of {self.spec.name}"):
            return source[index]


@dataclass(slots=True)
class ClientEpisode:
    """State of an episode that clients may read."""

    task: Task | None = None
    """``None`` before the first episode."""
    steps: int = 0
    """Actions and tool calls."""
    total: float = 0.0
    """Sum of the rewards."""
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    """Success according to the environment's last info; ``None`` if it has none. After a call that ended the episode,
    which has no info: True if the return reaches the environment's ``success_threshold``."""

    @property
    def is_over(self) -> bool:
        """True if the episode takes no more actions."""
        return self.terminated or self.truncated

    def to_plain(self) -> dict[str, Any]:
        """Return the fields for clients."""
        return {
            "task_id": None if self.task is None else self.task.id,
            "steps": self.steps,
            "total_reward": self.total,
            "done": self.is_over,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "success": self.success,
        }


class ServedEpisode:
    """A client's consecutive episodes in a borrowed environment. Calls are executed one at a time.

    Args:
        pool: Pool from which the environment is borrowed.
        tasks: The environment's tasks.
        settings: Settings of the server.
        starter: What a client calls to start an episode, for messages.
        default: Seed of the first episode without a chosen task; it increases by one with each such episode.
        clock: Time in seconds.
    """

    def __init__(
        self,
        pool: EnvPool,
        tasks: ServedTasks,
        settings: ServerSettings,
        *,
        starter: str,
        default: int,
        clock: Clock,
    ) -> None:
        self._pool, self._tasks, self._settings = pool, tasks, settings
        self._starter = starter
        self._default = default
        self._clock = clock
        self._used_at = clock()
        self._calls = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._handle: EnvHandle | None = None
        self._is_closed = False
        self.tools: Mapping[str, Tool] = {}
        """Tools of the current episode."""
        self.state = ClientEpisode()

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 while one is running."""
        return 0.0 if self._calls.locked() else self._clock() - self._used_at

    async def start(self, choice: TaskChoice) -> ResetResult:
        """Start an episode; the observation begins with the task's prompt, if it has one.

        Raises:
            UsageError: there is no such task, or the environment rejects it.
            EnvironmentFailure: the environment failed.
        """
        async with self._calls:
            task = await self._tasks.find(choice, default=self._default)
            self.state, self.tools = ClientEpisode(), {}  # a failed reset also ends the previous episode
            try:
                handle = await self._borrow()
                result = await handle.reset(task)
            except BaseException as error:
                await self._note(error)
                raise
            finally:
                self._used_at = self._clock()
            self._default += choice.index is None and choice.seed is None
            self.state = ClientEpisode(task=task, success=_success(result.info))
            self.tools = {tool.name: tool for tool in result.tools}
            return result

    async def step(self, action: str) -> StepResult:
        """Take an action.

        Raises:
            UsageError: no episode is running.
            EnvironmentFailure: the environment failed.
        """
        async with self._calls:
            handle = self._running()
            try:
                result = (await handle.step(action)).result
            except BaseException as error:
                await self._note(error)
                raise
            finally:
                self._used_at = self._clock()
            self._count(result.reward, terminated=result.terminated, truncated=result.truncated)
            self.state.success = _success(result.info, self.state.success)
            return result

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool of the environment; a tool that ends episodes terminates or truncates this one.

        Raises:
            ToolError: the tool is unknown, the arguments are wrong, or the tool failed; the message is for the policy.
            UsageError: no episode is running.
            EnvironmentFailure: the environment failed.
        """
        async with self._calls:
            self._running()
            try:
                result = await call_own_tool_in_time(self.tools, name, arguments, self._settings.step_timeout_s)
            except BaseException as error:
                await self._note(error)
                raise
            finally:
                self._used_at = self._clock()
            stopped = self.tools[name].stop or result.stop
            self._count(result.reward, terminated=stopped, truncated=result.truncated and not stopped)
            threshold = self._tasks.spec.success_threshold
            if result.success is not None:
                self.state.success = result.success
            elif self.state.terminated and threshold is not None:
                self.state.success = self.state.total >= threshold
            return result

    async def close(self) -> None:
        """Return the environment to the pool, which discards it if it failed or is still executing a call."""
        self._is_closed = True
        await self._give_back(RuntimeError("the session was closed during a call") if self._calls.locked() else None)

    def _running(self) -> EnvHandle:
        if self._handle is None or self.state.task is None:
            raise UsageError("no episode is running", hint=f"start one with {self._starter}")
        if self.state.is_over:
            how = "terminated" if self.state.terminated else "truncated"
            raise UsageError("the episode is over", got=how, hint=f"start another one with {self._starter}")
        return self._handle

    def _count(self, reward: float, *, terminated: bool, truncated: bool) -> None:
        self.state.steps += 1
        self.state.total += reward
        self.state.terminated, self.state.truncated = terminated, truncated

    async def _borrow(self) -> EnvHandle:
        if self._handle is None and not self._is_closed:
            async with AsyncExitStack() as stack:
                handle = await stack.enter_async_context(self._pool.borrow("a session"))
                if not self._is_closed:  # perhaps closed while it waited
                    self._handle, self._stack = handle, stack.pop_all()
        if self._handle is None:
            raise UsageError("the session was closed")
        return self._handle

    async def _note(self, error: BaseException) -> None:
        """Return a broken environment, so that the next start borrows another one.

        An environment also counts as broken after a cancelled call, whose effect is unknown.
        """
        if not isinstance(error, Exception) or is_fatal(error):
            self.state, self.tools = ClientEpisode(), {}
            await self._give_back(error)

    async def _give_back(self, failure: BaseException | None) -> None:
        """Return the environment to the pool, which discards it after a failure."""
        self._handle = None
        stack, self._stack = self._stack, AsyncExitStack()
        if failure is None:
            await stack.aclose()
        else:
            await stack.__aexit__(type(failure), failure, None)


def _success(info: Mapping[str, Any], default: bool | None = None) -> bool | None:
    success = info.get("success", default)
    return None if success is None else bool(success)


class EpisodeHost:
    """An environment served over another protocol: its pool, its tasks, and its tools before an episode.

    Args:
        spec: The environment.
        options: Options that override those of `spec`.
        settings: Settings of the server.
        starter: What a client calls to start an episode, for messages.
        clock: Time in seconds.

    Raises:
        UsageError: the run plays roles of the environment, which these protocols do not support.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        options: Mapping[str, Any],
        settings: ServerSettings,
        *,
        starter: str,
        clock: Clock = time.monotonic,
    ) -> None:
        self.options = {**spec.options, **options}
        self.spec, self.settings, self.clock = spec.with_instructions_under(self.options), settings, clock
        self._starter = starter
        if roles := spec.roles_under(self.options):
            raise UsageError(
                f"environment {spec.name} has roles that the run plays, which this protocol does not support",
                got=", ".join(roles),
                expected="an environment without such roles",
                hint="serve it without --protocol",
            )
        self.tasks = ServedTasks(spec, self.options)
        self._pool = EnvPool(
            spec,
            options=options,
            workers=settings.workers,
            max_concurrent=settings.max_sessions,
            reset_timeout_s=settings.reset_timeout_s,
            step_timeout_s=settings.step_timeout_s,
        )
        self._sessions = 0
        self.tools: list[RemoteTool] = []
        """Tools that the environment has before its first reset; set by `describe`."""

    async def describe(self) -> None:
        """Make an environment, to check the options and to find its tools.

        Raises:
            UsageError: the options are wrong.
            EnvironmentFailure: the environment cannot be made.
        """
        self.tools = await asyncio.to_thread(
            probe_environment,
            self.spec,
            self.options,
            lambda env: [RemoteTool.describe(tool) for tool in optional_part(env, "tools") or ()],
            deadline_s=self.settings.reset_timeout_s,
        )

    def open(self) -> ServedEpisode:
        """Open a session; it borrows an environment when its first episode starts."""
        self._sessions += 1
        first = self._sessions - 1  # sessions whose clients choose no task play different tasks
        return ServedEpisode(
            self._pool, self.tasks, self.settings, starter=self._starter, default=first, clock=self.clock
        )

    async def close(self) -> None:
        """Close all environments; idempotent."""
        await self._pool.close()


def first_text(task: Task, observation: Content) -> Content:
    """Return the first observation after the prompt of its task."""
    if not task.prompt:
        return observation
    if isinstance(observation, str):
        return f"{task.prompt}\n\n{observation}".rstrip()
    return (TextPart(text=f"{task.prompt}\n\n"), *observation)
