"""Pool of a run's environments: made on demand, isolated, and reused.

Episodes borrow an environment (`EnvPool.borrow`); at most `max_concurrent` are lent at a time. An environment is reused
after an episode without a failure, and discarded after a failure.

Blocking environments run in threads or worker processes, each in the one that made it. A worker runs calls one after
another; the deadline of a call starts when the worker starts it. A thread that hangs is abandoned and replaced. Worker
processes are for environments that crash, hang or hold the interpreter lock; a process that dies is replaced.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import math
import os
import pickle
import signal
import sys
import threading
from abc import ABC, abstractmethod
from asyncio.subprocess import Process
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

from agentrl.config.environment import EnvironmentConfig
from agentrl.env import AnyEnv, EnvironmentSpec, Isolation
from agentrl.errors import (
    AgentRLError,
    EnvironmentFailure,
    ToolError,
    UsageError,
    async_boundary,
    boundary,
    failure_of,
    is_addressed_to,
    running_task,
)
from agentrl.errors.foreign import CLOSE_S, await_or_abandon, close_in_time
from agentrl.remote.env_methods import CALL_TOOL, EnvMethod, RemoteTool, ResetResult, Stepped
from agentrl.rollout.env_adapter import EnvAdapter
from agentrl.rollout.env_worker_main import HEADER, KILL_S, MAKE, START, WorkerMessage
from agentrl.rollout.waits import WaitKind, WaitTracker
from agentrl.sandbox.orphan_guard import OrphanGuard, without_mark
from agentrl.sandbox.supervisor import kill_tree
from agentrl.task import Task

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W")
logger = logging.getLogger(__name__)

DRAIN_S = 5.0
"""Seconds that closing a pool waits for calls whose episodes are over."""
KEEPER_S = KILL_S + 2.0
"""Seconds that a keeper has to end its processes and itself before all of them are killed."""


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
        result: ResetResult = await self._call("reset", task.seed, task.options, deadline_s=self._reset_timeout_s)
        self._longest_step_s = self._requested_step_s(result.info)
        for tool in result.tools:
            if isinstance(tool, RemoteTool) and tool.remote is None:
                tool.remote = lambda name, arguments: self.call(CALL_TOOL, name, arguments)
        return result

    async def step(self, action: str) -> Stepped:
        """Take an action."""
        self._steps += 1
        stepped: Stepped = await self._call("step", action)
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
        where = f"task {self._task}, step {self._steps}" if method == "step" else f"task {self._task}"
        what = f"{method} of environment {self._name} ({where})"
        if deadline_s is None:
            deadline_s = max(self._step_timeout_s, self._longest_step_s)
        remedy = "environment.reset_timeout_s" if method == "reset" else None
        with self._waits.on(WaitKind.ENVIRONMENT, self.borrower, f"{method} of {self._name}", deadline_s, remedy):
            return await self.backend.call(method, *arguments, deadline_s=deadline_s, what=what)


class EnvWorker(Protocol):
    """Place in which environments run: a thread, a process, or processes on other machines."""

    async def make(
        self, factory: Callable[..., AnyEnv], options: Mapping[str, Any], *, what: str, deadline_s: float
    ) -> EnvBackend:
        """Make an environment; failures are `EnvironmentFailure` and name `what` failed."""

    async def drain(self, patience_s: float) -> None:
        """Wait until every call has ended; abandon those that nothing awaits after `patience_s` seconds."""

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
        self.spec = spec
        self.waits = waits or WaitTracker()
        self._options = {**spec.options, **(options or {})}
        self.roles = spec.roles_under(self._options)
        """Roles of the environments that the runtime plays."""
        isolation = isolation or spec.isolation_under(self._options)
        self._reset_timeout_s = reset_timeout_s
        self._step_timeout_s = step_timeout_s
        self.cleanup = AsyncExitStack()
        """Resources that are closed after the environments, such as those of the run's tools."""
        self._free = asyncio.Semaphore(max_concurrent)
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

    async def close(self, *, within_s: float = CLOSE_S) -> None:
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
        """Close an environment whose episode failed; go on after `DRAIN_S` if its worker still runs other calls."""
        closing = asyncio.create_task(handle.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.wait({closing}, timeout=DRAIN_S)

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


@dataclass(slots=True)
class WorkerCall(Generic[W]):
    """Call in the queue of a worker."""

    work: W
    what: str
    """Description for messages, such as ``"step of household (task 17)"``."""
    deadline_s: float
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SerialWorker(ABC, Generic[W]):
    """Worker that runs jobs in order of submission; a started job runs to its end or deadline even if cancelled."""

    def __init__(self) -> None:
        self._jobs: deque[WorkerCall[W]] = deque()
        self._pump: asyncio.Task[None] | None = None

    @abstractmethod
    async def execute(self, job: WorkerCall[W]) -> Any:
        """Run one job."""

    @abstractmethod
    async def stop(self, reason: str) -> None:
        """Abandon the running job; the next job gets a new thread or process."""

    async def close(self) -> None:
        """Release the worker; nothing may be running."""
        await self.stop("it was stopped")

    async def submit(self, work: W, *, what: str, deadline_s: float) -> Any:
        """Run `work` after everything submitted before it; failures are raised as `EnvironmentFailure`."""
        job = WorkerCall(work, what, deadline_s)
        self._jobs.append(job)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await job.result

    async def _run(self) -> None:
        pump = running_task()
        while self._jobs:
            job = self._jobs.popleft()
            if job.result.cancelled():
                continue
            try:
                outcome = await self._execute_in_time(job)
            except BaseException as error:
                if is_addressed_to(pump, error):
                    job.result.cancel()
                    raise
                if not job.result.done():
                    job.result.set_exception(failure_of(EnvironmentFailure, job.what, error))
            else:
                if not job.result.done():
                    job.result.set_result(outcome)

    async def _execute_in_time(self, job: WorkerCall[W]) -> Any:
        try:
            async with asyncio.timeout(job.deadline_s) as scope:
                return await self.execute(job)
        except TimeoutError as error:
            if not scope.expired():
                raise
            await self.stop("it hung and was killed")
            waited = f"no answer in {job.deadline_s:g} s"
            raise EnvironmentFailure(f"{job.what} missed its deadline", got=waited) from error

    async def drain(self, patience_s: float) -> None:
        """Wait until every submitted job has ended; abandon jobs that nobody awaits after `patience_s` seconds."""
        if self._pump is None or self._pump.done():
            return
        _, late = await asyncio.wait({self._pump}, timeout=patience_s)
        if late:
            await self.stop("it was stopped")
            self._pump.cancel()
            await asyncio.wait({self._pump})
            while self._jobs:
                self._jobs.popleft().result.cancel()


class EnvBackend(ABC):
    """Access to one environment from the event loop."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """True if calls can still succeed."""

    @abstractmethod
    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Call a method of the environment's `EnvAdapter`; failures are `EnvironmentFailure` and name `what` failed."""


class InlineBackend(EnvBackend):
    """Backend in the event loop; the deadline cannot interrupt blocking code here."""

    def __init__(self, adapter: EnvAdapter) -> None:
        self._adapter = adapter

    @property
    def is_alive(self) -> bool:
        """Always true."""
        return True

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Await the method in the event loop."""
        async with async_boundary(EnvironmentFailure, what, deadline_s=deadline_s):
            called = self._adapter.call(method, *arguments)
            return await (await_or_abandon(called, what) if self._adapter.is_async else called)


Work: TypeAlias = Callable[[], Any]
_Inbox: TypeAlias = "SimpleQueue[tuple[WorkerCall[Work], asyncio.Future[Any]] | None]"


class ThreadWorker(SerialWorker[Work]):
    """Worker that runs functions in one daemon thread, which starts with the first function."""

    def __init__(self) -> None:
        super().__init__()
        self._inbox: _Inbox | None = None

    async def make(
        self, factory: Callable[..., AnyEnv], options: Mapping[str, Any], *, what: str, deadline_s: float
    ) -> EnvBackend:
        """Make an environment in the thread; if its methods are coroutines, they run in the event loop."""
        adapter: EnvAdapter = await self.submit(
            functools.partial(EnvAdapter, factory, options), what=what, deadline_s=deadline_s
        )
        return InlineBackend(adapter) if adapter.is_async else ThreadBackend(self, adapter)

    async def execute(self, job: WorkerCall[Work]) -> Any:
        """Run the function in the thread and wait for its result."""
        if self._inbox is None:
            self._inbox = SimpleQueue()
            threading.Thread(target=_serve, args=(self._inbox,), name="agentrl-environment", daemon=True).start()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.put((job, done))
        return await done

    async def stop(self, reason: str) -> None:
        """Let the thread end after its current function."""
        if self._inbox is not None:
            self._inbox.put(None)
            self._inbox = None


class ThreadBackend(EnvBackend):
    """Backend in a thread; all calls run in the same thread."""

    def __init__(self, worker: ThreadWorker, adapter: EnvAdapter) -> None:
        self._worker = worker
        self._adapter = adapter
        self._running = False

    @property
    def is_alive(self) -> bool:
        """True if no call is running, in particular none in an abandoned thread."""
        return not self._running

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Run the method in the thread; the deadline counts from when the thread is free."""

        def work() -> Any:
            self._running = True
            try:
                return run_coroutine(self._adapter.call(method, *arguments))
            finally:
                self._running = False

        return await self._worker.submit(work, deadline_s=deadline_s, what=what)


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise RuntimeError("a synchronous environment suspended")


def _serve(inbox: _Inbox) -> None:
    while (item := inbox.get()) is not None:
        job, done = item
        result, error = None, None
        try:
            with boundary(EnvironmentFailure, job.what):
                result = job.work()
        except AgentRLError as raised:
            error = raised
        loop = done.get_loop()
        if loop.is_closed():
            return
        loop.call_soon_threadsafe(_deliver, done, result, error)


def _deliver(done: asyncio.Future[Any], result: Any, error: AgentRLError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


class ProcessWorker(SerialWorker[WorkerMessage]):
    """Worker with one process at a time, which several environments share."""

    def __init__(self) -> None:
        super().__init__()
        self._process: Process | None = None
        self._numbers = itertools.count()
        self._alive: set[int] = set()
        """Numbers of the environments in the present process."""
        self._last_words = "it was stopped"

    async def make(
        self, factory: Callable[..., AnyEnv], options: Mapping[str, Any], *, what: str, deadline_s: float
    ) -> EnvBackend:
        """Make an environment in the process."""
        number = next(self._numbers)
        await self.submit((number, MAKE, (factory, dict(options))), what=what, deadline_s=deadline_s)
        return ProcessBackend(self, number)

    def is_alive(self, number: int) -> bool:
        """Return True if the present process has the environment with this number."""
        return number in self._alive

    async def execute(self, job: WorkerCall[WorkerMessage]) -> Any:
        """Exchange one call for its reply."""
        number, method, _ = job.work
        if method != MAKE and number not in self._alive:
            raise EnvironmentFailure(f"{job.what} failed", got=f"its worker process is gone: {self._last_words}")
        message = _pickle_call(job)
        process = self._process or await self._start()
        try:
            reply = await _exchange(process, message)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await self.stop(f"exit code {await _wait_for_keeper(process)}")
            raise EnvironmentFailure(f"{job.what} failed", got=f"its worker died ({self._last_words})") from error
        succeeded, value = reply
        if not succeeded:
            kind, text = value
            keeps_text = issubclass(kind, UsageError | ToolError)  # the user or the policy reads it
            raise kind(text if keeps_text else f"{job.what} failed: {text}")
        if method == MAKE:
            self._alive.add(number)
        return value

    async def stop(self, reason: str) -> None:
        """End the process and all its environments."""
        process, self._process = self._process, None
        if process is None:
            return
        self._alive.clear()
        self._last_words = reason
        assert process.stdin is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # the keeper kills the processes that environments started
        process.stdin.close()
        await _wait_for_keeper(process)

    async def _start(self) -> Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-c",
            START,
            str(os.getpid()),
            json.dumps([str(path) for path in sys.path]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=without_mark(os.environ),
            start_new_session=True,  # keeps Ctrl-C in the trainer's terminal from reaching it
        )
        return self._process


async def _wait_for_keeper(process: Process) -> int | None:
    """Return a keeper's exit code; kill it and its processes after `KEEPER_S`. ``None``: it hangs in the kernel."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)  # a stopped keeper handles no signal
    for _ in range(2):
        with suppress(TimeoutError):
            return await asyncio.wait_for(process.wait(), KEEPER_S)
        kill_tree(process.pid)
    logger.warning("worker process %d does not end although it was killed", process.pid)
    return None


class ProcessBackend(EnvBackend):
    """Backend in a worker process that several environments share."""

    def __init__(self, worker: ProcessWorker, number: int) -> None:
        self._worker = worker
        self._number = number

    @property
    def is_alive(self) -> bool:
        """True if the process that made the environment still runs."""
        return self._worker.is_alive(self._number)

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Send the call to the process; the deadline counts from when the process is free."""
        return await self._worker.submit((self._number, method, arguments), what=what, deadline_s=deadline_s)


def _pickle_call(job: WorkerCall[WorkerMessage]) -> bytes:
    try:
        return pickle.dumps(job.work)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{job.what} cannot run in a worker process",
            got=error,
            expected="a factory, options and tasks that can be pickled and imported by name",
            hint="move the environment into its own module, or set environment.isolation to thread",
        ) from error


async def _exchange(process: Process, message: bytes) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(message)
    await process.stdin.drain()
    (length,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
    return pickle.loads(await process.stdout.readexactly(length))
