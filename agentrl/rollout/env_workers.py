"""Workers that run calls one after another in a thread or a process, and the environments in them.

The deadline of a call starts when the worker starts it. A thread that hangs is abandoned and replaced. Worker processes
are for environments that crash, hang or hold the interpreter lock; a process that dies is replaced.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import os
import pickle
import signal
import sys
import threading
from abc import ABC, abstractmethod
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from agentrl.env import AnyEnv
from agentrl.errors import (
    AgentRLError,
    EnvironmentFailure,
    ToolError,
    UsageError,
    boundary,
    failure_of,
    is_addressed_to,
    running_task,
)
from agentrl.errors.deadlines import async_boundary
from agentrl.errors.foreign import await_or_abandon, end_forked_copy
from agentrl.rollout.env_adapter import EnvAdapter
from agentrl.rollout.env_worker_main import HEADER, MAKE, START, WORKER_KILL_S, WorkerMessage
from agentrl.sandbox.orphan_guard import without_mark
from agentrl.sandbox.supervisor import kill_tree

W = TypeVar("W")
logger = logging.getLogger(__name__)
SUPERVISOR_END_S = WORKER_KILL_S + 2.0
"""Seconds that a worker's supervisor has to end its processes and itself before all of them are killed."""
Work: TypeAlias = Callable[[], Any]
_Inbox: TypeAlias = "SimpleQueue[tuple[WorkerCall[Work], asyncio.Future[Any]] | None]"


@dataclass(slots=True)
class WorkerCall(Generic[W]):
    """Call in the queue of a worker."""

    work: W
    what: str
    """Description for messages, such as ``"step of household (task 17)"``."""
    deadline_s: float
    failure: type[EnvironmentFailure] = EnvironmentFailure
    """Type of the error that a failure of the call becomes."""
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

    async def submit(
        self, work: W, *, what: str, deadline_s: float, failure: type[EnvironmentFailure] = EnvironmentFailure
    ) -> Any:
        """Run `work` after everything submitted before it; failures are raised as `failure`."""
        job = WorkerCall(work, what, deadline_s, failure)
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
                    job.result.set_exception(failure_of(job.failure, job.what, error))
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
            raise job.failure(f"{job.what} missed its deadline", got=waited) from error

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


class ForwardingBackend(EnvBackend):
    """Backend that passes every call to another one; subclasses change some of them.

    Args:
        backend: Backend that gets the calls.
    """

    def __init__(self, backend: EnvBackend) -> None:
        self.backend = backend

    @property
    def is_alive(self) -> bool:
        """True if calls can still succeed."""
        return self.backend.is_alive

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Call a method of the environment."""
        return await self.backend.call(method, *arguments, deadline_s=deadline_s, what=what)


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
        result, error, process = None, None, os.getpid()
        try:
            with boundary(job.failure, job.what):
                result = job.work()
        except AgentRLError as raised:
            error = raised
        end_forked_copy(process)
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
        self._exit_reason = "it was stopped"

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
            raise EnvironmentFailure(f"{job.what} failed", got=f"its worker process is gone: {self._exit_reason}")
        message = _pickle_call(job)
        process = self._process or await self._start()
        try:
            reply = await _exchange(process, message)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await self.stop(f"exit code {await _wait_for_supervisor(process)}")
            raise EnvironmentFailure(f"{job.what} failed", got=f"its worker died ({self._exit_reason})") from error
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
        self._exit_reason = reason
        assert process.stdin is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # the supervisor kills the processes that environments started
        process.stdin.close()
        await _wait_for_supervisor(process)

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


async def _wait_for_supervisor(process: Process) -> int | None:
    """Return a supervisor's exit code, or ``None`` if it hangs in the kernel; kill it after `SUPERVISOR_END_S`."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)  # a stopped supervisor handles no signal
    for _ in range(2):
        with suppress(TimeoutError):
            return await asyncio.wait_for(process.wait(), SUPERVISOR_END_S)
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
