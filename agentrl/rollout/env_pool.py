"""Pool of a run's environments: made on demand, isolated, and reused.

Episodes borrow an environment (`EnvPool.borrow`); at most `max_concurrent` are lent at a time. An environment is reused
after an episode without a failure, and discarded after a failure.

Blocking environments run in threads (`env_workers`) or worker processes (`env_processes`), each where it was made.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import shlex
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ParamSpec, Protocol, TypeVar

from agentrl.config.environment import EnvironmentConfig
from agentrl.env import AnyEnv, EnvironmentSpec, Isolation
from agentrl.errors import AgentRLError, EnvironmentFailure, boundary, running_task
from agentrl.errors.deadlines import CLOSING_S, close_in_time
from agentrl.errors.foreign import EPISODE_GRACE_S
from agentrl.remote.env_methods import CALL_TOOL, RESET, STEP, EnvMethod, RemoteTool, ResetResult, StepReply
from agentrl.rollout.env_processes import ProcessWorker
from agentrl.rollout.env_workers import EnvAdapter, EnvBackend, InlineBackend, ThreadWorker
from agentrl.rollout.waits import WaitKind, WaitTracker
from agentrl.sandbox.orphan_guard import OrphanGuard
from agentrl.task import Task

TASKS_PER_PASS = 32
"""Maximum number of episodes whose asyncio tasks are made in one pass of the event loop; each takes about 0.2 ms."""
STARTS_PER_PASS = 4
"""Maximum number of environments that start in one pass; each start takes about a millisecond."""


class StartPacer:
    """Pacer that lets a limited number of waiting tasks continue in each pass of the event loop, in order."""

    def __init__(self, per_pass: int = STARTS_PER_PASS) -> None:
        self._per_pass = self._left = per_pass
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def wait(self) -> None:
        """Return at once if fewer than the limit have started in this pass, otherwise in a later pass."""
        if self._left and not self._waiting:
            self._left -= 1
            self._schedule()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_pass)

    def _begin_pass(self) -> None:
        self._is_scheduled, self._left = False, self._per_pass
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # not cancelled
                turn.set_result(None)
                self._left -= 1
        if self._left < self._per_pass:
            self._schedule()


P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger(__name__)

DRAIN_S = 5.0
"""Seconds that closing a pool waits for calls whose episodes are over."""


class EnvHandle:
    """Environment of an episode; its methods are coroutines with deadlines."""

    def __init__(
        self, backend: EnvBackend, *, name: str, waits: WaitTracker, reset_timeout_s: float, step_timeout_s: float
    ) -> None:
        self.backend = backend
        self._name = name
        self._waits = waits
        self._reset_timeout_s = reset_timeout_s
        self._step_timeout_s = step_timeout_s
        self._task = "none"
        self._steps = 0
        self._longest_step_s = 0.0
        self.borrower = "no episode"
        """Id of the trajectory whose episode uses the environment."""

    async def reset(self, task: Task) -> ResetResult:
        """Start the task's episode."""
        self._task, self._steps, self._longest_step_s = task.id, 0, 0.0
        result: ResetResult = await self._call(RESET.name, task.seed, task.options, deadline_s=self._reset_timeout_s)
        self._longest_step_s = self._requested_step_s(result.info)
        for tool in result.tools:
            if isinstance(tool, RemoteTool) and tool.remote is None:
                tool.remote = lambda name, arguments: self.call(CALL_TOOL, name, arguments)
        return result

    async def step(self, action: str) -> StepReply:
        """Take an action."""
        self._steps += 1
        stepped: StepReply = await self._call(STEP.name, action)
        return stepped

    def _requested_step_s(self, info: Mapping[str, Any]) -> float:
        """Return the seconds that the environment requests for each step of the task; 0 if it requests none."""
        requested = info.get("step_timeout_s", 0.0)
        if isinstance(requested, bool) or not isinstance(requested, int | float) or not 0 <= requested < math.inf:
            raise EnvironmentFailure(
                f'info["step_timeout_s"] of environment {self._name} cannot be used',
                got=repr(requested),
                expected="seconds",
            )
        return float(requested)

    async def close(self) -> None:
        """Release the environment; a failure is only logged, because its episodes are over."""
        try:
            await self._call("close")
        except AgentRLError as error:
            logger.warning("%s", error)

    def call(self, method: EnvMethod[P, R], *arguments: P.args, **_: P.kwargs) -> Awaitable[R]:
        """Call a method of `agentrl.remote.env_methods`; failures are raised as `EnvironmentFailure`."""
        return self._call(method.name, *arguments)

    async def _call(self, method: str, *arguments: Any, deadline_s: float | None = None) -> Any:
        where = f"task {self._task}, step {self._steps}" if method == STEP.name else f"task {self._task}"
        what = f"{method} of environment {self._name} ({where})"
        if deadline_s is None:
            deadline_s = max(self._step_timeout_s, self._longest_step_s)
        remedy = "environment.reset_timeout_s" if method == RESET.name else None
        with self._waits.on(WaitKind.ENVIRONMENT, self.borrower, f"{method} of {self._name}", deadline_s, remedy):
            try:
                return await self.backend.call(method, *arguments, deadline_s=deadline_s, what=what)
            except EnvironmentFailure as error:
                error.add_hint(f"check the environment with: agentrl env check {shlex.quote(self._name)}")
                raise


class EnvWorker(Protocol):
    """Worker that runs environments: a thread, a process, or processes on other machines."""

    async def make(
        self, factory: Callable[..., AnyEnv], options: Mapping[str, Any], *, what: str, deadline_s: float
    ) -> EnvBackend:
        """Make an environment; failures are `EnvironmentFailure` and name `what` failed."""

    async def drain(self, patience_s: float) -> None:
        """Wait until every call has ended; after `patience_s` seconds, abandon calls without an awaiting caller."""

    async def close(self) -> None:
        """Release the worker; nothing may be running."""


class EnvPool:
    """Pool that makes, lends, reuses and closes the environments of one run.

    Args:
        spec: Environment to make.
        options: Keyword arguments of the factory, in addition to the spec's own.
        isolation: Isolation of blocking code; the spec's choice by default. Environments whose methods are coroutines
            run in the event loop unless they have worker processes.
        workers: Number of threads or processes.
        max_concurrent: Maximum number of environments lent at a time.
        reset_timeout_s: Deadline for making or resetting an environment.
        step_timeout_s: Deadline for every other call.
        waits: Registers the waits of episodes; a new tracker by default.
        worker: Runs all environments, on other machines, instead of `isolation` and `workers`.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        options: Mapping[str, Any] | None = None,
        isolation: Isolation | None = None,
        workers: int = 4,
        max_concurrent: int = 256,
        reset_timeout_s: float = 60.0,
        step_timeout_s: float = 30.0,
        waits: WaitTracker | None = None,
        worker: EnvWorker | None = None,
    ) -> None:
        self._options = {**spec.options, **(options or {})}
        self.spec = spec = spec.with_instructions_under(self._options)
        self.waits = waits or WaitTracker()
        self.roles = spec.roles_under(self._options)
        """Roles of the environments that the runtime plays."""
        isolation = isolation or spec.isolation_under(self._options)
        self._reset_timeout_s = reset_timeout_s
        self._step_timeout_s = step_timeout_s
        self.cleanup = AsyncExitStack()
        """Resources that are closed after the environments, such as those of the run's tools."""
        self._free, self._pacer = asyncio.Semaphore(max_concurrent), StartPacer()
        self._idle: list[EnvHandle] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._turn = itertools.count()
        self._guard = None if isolation is Isolation.PROCESS or worker is not None else OrphanGuard()
        self._workers: Sequence[EnvWorker] = []
        if worker is not None:
            self._workers = [worker]
        elif isolation is Isolation.THREAD:
            self._workers = [ThreadWorker() for _ in range(workers)]
        elif isolation is Isolation.PROCESS:
            self._workers = [ProcessWorker() for _ in range(workers)]

    @classmethod
    def from_config(
        cls,
        spec: EnvironmentSpec,
        config: EnvironmentConfig,
        *,
        waits: WaitTracker | None = None,
        worker: EnvWorker | None = None,
    ) -> EnvPool:
        """Make the pool that the config's ``environment`` section describes."""
        return cls(
            spec,
            options=config.options,
            isolation=config.isolation,
            workers=config.workers,
            max_concurrent=config.max_concurrent,
            reset_timeout_s=config.reset_timeout_s,
            step_timeout_s=config.step_timeout_s,
            waits=waits,
            worker=worker,
        )

    @asynccontextmanager
    async def borrow(self, who: str) -> AsyncIterator[EnvHandle]:
        """Lend an environment to `who` for one episode."""
        with self.waits.on(WaitKind.CAPACITY, who, f"a free {self.spec.name} environment"):
            await self._pacer.wait()
            await self._free.acquire()
        try:
            handle = self._take_idle() or await self._make(who)
            handle.borrower = who
            try:
                yield handle
            except BaseException:
                if handle.backend.is_alive:
                    await self._close_handle(handle)
                raise
            self._idle.append(handle)
        finally:
            self._free.release()

    async def close(self, *, within_s: float = CLOSING_S) -> None:
        """Close all environments and workers; abandon those that take longer. Only abandoned episodes may be running.

        Args:
            within_s: Seconds for all environments together, and again for other resources; see `close_in_time`.
        """
        name = self.spec.name
        async with AsyncExitStack() as stack:
            stack.push_async_callback(close_in_time, self.cleanup.aclose, f"closing the tools of {name}", within_s)
            if self._guard is not None:
                stack.callback(self._guard.close)
            stack.push_async_callback(self._close_workers)
            await close_in_time(self._close_environments, f"closing the {name} environments", within_s)

    async def _close_workers(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def _close_environments(self) -> None:
        await asyncio.gather(*(worker.drain(DRAIN_S) for worker in self._workers))
        idle = (handle.close() for handle in self._idle if handle.backend.is_alive)
        await asyncio.gather(*self._closing, *idle, return_exceptions=True)
        self._idle.clear()

    async def _close_handle(self, handle: EnvHandle) -> None:
        """Close an environment whose episode failed; wait at most `DRAIN_S`, or less if the episode is cancelled."""
        closing = asyncio.create_task(handle.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        is_cancelled = (episode := running_task()) is not None and episode.cancelling() > 0
        await asyncio.wait({closing}, timeout=EPISODE_GRACE_S / 2 if is_cancelled else DRAIN_S)

    def _take_idle(self) -> EnvHandle | None:
        while self._idle:
            handle = self._idle.pop()
            if handle.backend.is_alive:
                return handle
        return None

    async def _make(self, who: str) -> EnvHandle:
        limit, remedy = self._reset_timeout_s, "environment.reset_timeout_s"
        with self.waits.on(WaitKind.ENVIRONMENT, who, f"a new {self.spec.name}", limit, remedy):
            backend = await self._make_backend(f"making environment {self.spec.name}")
        return EnvHandle(
            backend,
            name=self.spec.name,
            waits=self.waits,
            reset_timeout_s=self._reset_timeout_s,
            step_timeout_s=self._step_timeout_s,
        )

    async def _make_backend(self, what: str) -> EnvBackend:
        with boundary(EnvironmentFailure, what):
            if self._guard is not None:
                self._guard.start()
            if not self._workers:
                return InlineBackend(EnvAdapter(self.spec.make, self._options))
        worker = self._workers[next(self._turn) % len(self._workers)]
        return await worker.make(self.spec.make, self._options, what=what, deadline_s=self._reset_timeout_s)
