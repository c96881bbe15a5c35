"""Environments of a run: made on demand, kept for the next episode, and run where their code cannot hurt.

Episodes borrow an environment (`EnvPool.borrow`); at most `max_concurrent` are lent at once. An environment
whose episode ended well is reset and used again; after a failure it is thrown away. Blocking environments live in
threads or worker processes (`agentrl.rollout.env_workers`), and stay in the one in which they were made.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ParamSpec, TypeVar

from agentrl.config.environment import EnvironmentConfig
from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import AgentRLError, EnvironmentFailure, boundary
from agentrl.remote.env_methods import CALL_TOOL, CLOSE, RESET, STEP, EnvMethod, RemoteTool, ResetResult, Stepped
from agentrl.rollout.env_adapter import EnvAdapter
from agentrl.rollout.env_workers import EnvBackend, InlineBackend, ProcessWorker, SerialWorker, ThreadWorker
from agentrl.rollout.waits import WaitKind, Waits
from agentrl.task import Task

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger(__name__)


class EnvHandle:
    """One environment as an episode sees it: coroutines with deadlines.

    Args:
        backend: Where its code runs.
        name: The environment's registry name, for messages.
        waits: Where waiting is registered.
        reset_timeout_s: Deadline of a reset.
        step_timeout_s: Deadline of everything else.
    """

    def __init__(
        self, backend: EnvBackend, *, name: str, waits: Waits, reset_timeout_s: float, step_timeout_s: float
    ) -> None:
        self.backend = backend
        self._name = name
        self._waits = waits
        self._reset_timeout_s = reset_timeout_s
        self._step_timeout_s = step_timeout_s
        self._task = "none"
        self._steps = 0
        self.borrower = "nobody"
        """The id of the trajectory whose episode has it."""

    async def reset(self, task: Task) -> ResetResult:
        """Start the task's episode."""
        self._task, self._steps = task.id, 0
        result = await self.call(RESET, task.seed, task.options)
        for tool in result.tools:
            if isinstance(tool, RemoteTool) and tool.remote is None:
                tool.remote = lambda name, arguments: self.call(CALL_TOOL, name, arguments)
        return result

    async def step(self, action: str) -> Stepped:
        """Take an action."""
        self._steps += 1
        return await self.call(STEP, action)

    async def close(self) -> None:
        """Release it; a failure is logged, for the episodes are over."""
        try:
            await self.call(CLOSE)
        except AgentRLError as error:
            logger.warning("%s", error)

    async def call(self, method: EnvMethod[P, R], *arguments: P.args, **_: P.kwargs) -> R:
        """Call a method of `agentrl.remote.env_methods`.

        Raises:
            EnvironmentFailure: it raised, returned nonsense, or missed its deadline.
        """
        name = method.name
        where = f"task {self._task}, step {self._steps}" if method is STEP else f"task {self._task}"
        what = f"{name} of environment {self._name} ({where})"
        deadline_s = self._reset_timeout_s if method is RESET else self._step_timeout_s
        with self._waits.on(WaitKind.ENVIRONMENT, self.borrower, f"{name} of {self._name}"):
            result: R = await self.backend.call(name, *arguments, deadline_s=deadline_s, what=what)
        return result


class EnvPool:
    """Makes, lends, keeps and closes the environments of one run.

    Args:
        spec: What to make.
        options: Keyword arguments of the factory, besides the spec's own.
        isolation: Where blocking code runs; the spec's choice when left out. Environments whose methods are
            coroutines run in the event loop unless they have worker processes.
        workers: Threads or processes.
        max_concurrent: Most environments lent at once.
        reset_timeout_s: Deadline of making and resetting one.
        step_timeout_s: Deadline of a step and of everything else.
        waits: Where waiting is registered.
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
        waits: Waits | None = None,
    ) -> None:
        self.spec = spec
        self.waits = waits or Waits()
        self._options = {**spec.options, **(options or {})}
        self._isolation = isolation or spec.isolation_under(self._options)
        self._reset_timeout_s = reset_timeout_s
        self._step_timeout_s = step_timeout_s
        self.belongings = AsyncExitStack()
        """What is closed after the environments: what tools of the run hold."""
        self._free = asyncio.Semaphore(max_concurrent)
        self._idle: list[EnvHandle] = []
        self._turn = itertools.count()
        self._threads = [ThreadWorker() for _ in range(workers)] if self._isolation is Isolation.THREAD else []
        self._processes = [ProcessWorker() for _ in range(workers)] if self._isolation is Isolation.PROCESS else []

    @classmethod
    def from_config(cls, spec: EnvironmentSpec, config: EnvironmentConfig, *, waits: Waits | None = None) -> EnvPool:
        """Make the pool of the config's ``environment`` section."""
        return cls(
            spec,
            options=config.options,
            isolation=config.isolation,
            workers=config.workers,
            max_concurrent=config.max_concurrent,
            reset_timeout_s=config.reset_timeout_s,
            step_timeout_s=config.step_timeout_s,
            waits=waits,
        )

    @asynccontextmanager
    async def borrow(self, who: str) -> AsyncIterator[EnvHandle]:
        """Lend an environment to `who` for one episode.

        Raises:
            EnvironmentFailure: it cannot be made.
        """
        with self.waits.on(WaitKind.CAPACITY, who, f"a free {self.spec.name} environment"):
            await self._free.acquire()
        try:
            handle = self._take_idle() or await self._make(who)
            handle.borrower = who
            try:
                yield handle
            except BaseException:
                await self._discard(handle)
                raise
            self._idle.append(handle)
        finally:
            self._free.release()

    async def close(self) -> None:
        """Close all environments and workers. No episode may be running."""
        await asyncio.gather(*(handle.close() for handle in self._idle if handle.backend.is_alive))
        self._idle.clear()
        workers: list[SerialWorker[Any]] = [*self._threads, *self._processes]
        for worker in workers:
            await worker.drain()
            await worker.close()
        await self.belongings.aclose()

    def _take_idle(self) -> EnvHandle | None:
        while self._idle:
            handle = self._idle.pop()
            if handle.backend.is_alive:
                return handle
        return None

    async def _discard(self, handle: EnvHandle) -> None:
        if handle.backend.is_alive:
            await handle.close()

    async def _make(self, who: str) -> EnvHandle:
        with self.waits.on(WaitKind.ENVIRONMENT, who, f"a new {self.spec.name}"):
            backend = await self._make_backend(f"making environment {self.spec.name}")
        return EnvHandle(
            backend,
            name=self.spec.name,
            waits=self.waits,
            reset_timeout_s=self._reset_timeout_s,
            step_timeout_s=self._step_timeout_s,
        )

    async def _make_backend(self, what: str) -> EnvBackend:
        make, options, deadline_s = self.spec.make, self._options, self._reset_timeout_s
        if self._processes:
            process = self._processes[next(self._turn) % len(self._processes)]
            return await process.make(make, options, what=what, deadline_s=deadline_s)
        if self._threads:
            thread = self._threads[next(self._turn) % len(self._threads)]
            return await thread.make(make, options, what=what, deadline_s=deadline_s)
        with boundary(EnvironmentFailure, what):
            return InlineBackend(EnvAdapter(make, options))
