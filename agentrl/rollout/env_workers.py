"""Backends that run the code of environments: in the event loop, in threads, or in worker processes.

A worker, a thread or a process, runs calls one after another, each with a deadline that starts when its turn comes. A
thread that hangs is abandoned and replaced; a process, for environments that crash, hang or hold the interpreter lock,
is replaced when it dies. Each environment is reached through an `EnvBackend`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import pickle
import signal
import struct
import sys
import threading
from abc import ABC, abstractmethod
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from agentrl.env import AnyEnv
from agentrl.errors import (
    AgentRLError,
    EnvironmentFailure,
    ToolError,
    UsageError,
    async_boundary,
    boundary,
    described_error,
    is_addressed_to,
    running_task,
)
from agentrl.rollout.env_adapter import EnvAdapter

W = TypeVar("W")


@dataclass(slots=True)
class WorkerCall(Generic[W]):
    """One call that waits for its turn."""

    work: W
    what: str
    """What it does, for messages: ``"step of household (task 17)"``."""
    deadline_s: float
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SerialWorker(ABC, Generic[W]):
    """Runs jobs in the order in which they came; a job whose caller is cancelled still runs to its end or deadline."""

    def __init__(self) -> None:
        self._jobs: deque[WorkerCall[W]] = deque()
        self._pump: asyncio.Task[None] | None = None

    @abstractmethod
    async def execute(self, job: WorkerCall[W]) -> Any:
        """Run one job."""

    @abstractmethod
    async def replace(self) -> None:
        """Give up on what runs now and make the worker usable again."""

    @abstractmethod
    async def close(self) -> None:
        """Release the worker; nothing may be running."""

    async def submit(self, work: W, *, what: str, deadline_s: float) -> Any:
        """Run `work` after everything submitted before it.

        Raises:
            EnvironmentFailure: it raised, missed its deadline, or the worker died.
        """
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
                    raise
                if not job.result.done():
                    job.result.set_exception(_classified(job, error))
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
            await self.replace()
            waited = f"no answer in {job.deadline_s:g} s"
            raise EnvironmentFailure(f"{job.what} missed its deadline", got=waited) from error

    async def drain(self) -> None:
        """Wait until every submitted job has ended."""
        if self._pump is not None:
            await self._pump


def _classified(job: WorkerCall[W], error: BaseException) -> AgentRLError:
    if isinstance(error, AgentRLError):
        return error
    failure = EnvironmentFailure(f"{job.what} failed", got=described_error(error))
    failure.__cause__ = error
    return failure


class EnvBackend(ABC):
    """One environment, reachable from the event loop."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """True if calls can still succeed."""

    @abstractmethod
    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Call a method of the environment's `EnvAdapter`.

        Raises:
            EnvironmentFailure: it raised, returned nonsense, missed its deadline, or its worker died; `what` says
                what was being done.
        """


class InlineBackend(EnvBackend):
    """Backend in the event loop.

    The deadline bounds asynchronous environments only: nothing interrupts blocking code here.
    """

    def __init__(self, adapter: EnvAdapter) -> None:
        self._adapter = adapter

    @property
    def is_alive(self) -> bool:
        """Always true."""
        return True

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Await the method itself."""
        async with async_boundary(EnvironmentFailure, what, deadline_s=deadline_s):
            return await self._adapter.call(method, *arguments)


Work: TypeAlias = Callable[[], Any]
_Inbox: TypeAlias = "SimpleQueue[tuple[WorkerCall[Work], asyncio.Future[Any]] | None]"


class ThreadWorker(SerialWorker[Work]):
    """Runs functions in one daemon thread, which starts with the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self._inbox: _Inbox | None = None

    async def make(
        self, factory: Callable[..., AnyEnv], options: Mapping[str, Any], *, what: str, deadline_s: float
    ) -> EnvBackend:
        """Make an environment in the thread; one whose methods are coroutines goes on in the event loop."""
        adapter: EnvAdapter = await self.submit(
            functools.partial(EnvAdapter, factory, options), what=what, deadline_s=deadline_s
        )
        return InlineBackend(adapter) if adapter.is_async else ThreadBackend(self, adapter)

    async def execute(self, job: WorkerCall[Work]) -> Any:
        """Hand the function to the thread and wait."""
        if self._inbox is None:
            self._inbox = SimpleQueue()
            threading.Thread(target=_serve, args=(self._inbox,), name="agentrl-environment", daemon=True).start()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.put((job, done))
        return await done

    async def replace(self) -> None:
        """Abandon the thread, which hangs; the next function gets a new one."""
        await self.close()

    async def close(self) -> None:
        """Let the thread end after what it does now."""
        if self._inbox is not None:
            self._inbox.put(None)
            self._inbox = None


class ThreadBackend(EnvBackend):
    """Backend in a thread; always the same one, for code that cares."""

    def __init__(self, worker: ThreadWorker, adapter: EnvAdapter) -> None:
        self._worker = worker
        self._adapter = adapter
        self._running = False

    @property
    def is_alive(self) -> bool:
        """True if no call of it still runs somewhere."""
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
    """The result of a coroutine that never suspends."""
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


HEADER = struct.Struct("<Q")
"""Length of the pickled reply that follows."""
LARGEST_REPLY = 256 * 2**20
"""Maximum number of bytes of a pickled reply; a larger one is an error of the environment."""


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """Message to the process: a method of one of its environments, or ``make``."""

    number: int
    """Which environment."""
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Work:
    call: RemoteCall
    life: int | None
    """The life of the process that the call needs; ``None``: any."""


class ProcessWorker(SerialWorker[_Work]):
    """Talks to one process at a time; `life` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.life = 0
        self._process: Process | None = None
        self._numbers = itertools.count()
        self._last_words = "it was stopped"

    async def make(
        self, factory: Callable[..., AnyEnv], options: Mapping[str, Any], *, what: str, deadline_s: float
    ) -> EnvBackend:
        """Make an environment in the process."""
        number = next(self._numbers)
        work = _Work(RemoteCall(number, "make", (factory, dict(options))), None)
        await self.submit(work, what=what, deadline_s=deadline_s)
        return ProcessBackend(self, number, self.life)

    async def execute(self, job: WorkerCall[_Work]) -> Any:
        """Exchange one call for its reply."""
        if job.work.life not in (None, self.life):
            raise EnvironmentFailure(f"{job.what} failed", got=f"its worker process is gone: {self._last_words}")
        message = _pickled(job)
        process = self._process or await self._start()
        try:
            reply = await _exchange(process, message)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await self._bury(f"exit code {await process.wait()}")
            raise EnvironmentFailure(f"{job.what} failed", got=f"its worker died ({self._last_words})") from error
        succeeded, value = reply
        if not succeeded:
            kind, text = value
            is_for_its_reader = issubclass(kind, UsageError | ToolError)
            raise kind(text if is_for_its_reader else f"{job.what} failed: {text}")
        return value

    async def replace(self) -> None:
        """Kill the process; all its environments are lost with it."""
        if self._process is not None:
            await self._bury("it hung and was killed")

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            await self._bury("it was stopped")

    async def _start(self) -> Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "agentrl.rollout.env_worker_main",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the trainer's terminal does not reach it
        )
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps(sys.path))
        return self._process

    async def _bury(self, last_words: str) -> None:
        self.life += 1
        self._last_words = last_words
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # the keeper kills what the environments started
            process.stdin.close()
            await process.wait()


class ProcessBackend(EnvBackend):
    """Backend in a worker process that several environments share."""

    def __init__(self, worker: ProcessWorker, number: int, life: int) -> None:
        self._worker = worker
        self._number = number
        self._life = life

    @property
    def is_alive(self) -> bool:
        """True if the process is still the one in which the environment was made."""
        return self._worker.life == self._life

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Send the call to the process; the deadline counts from when the process is free."""
        work = _Work(RemoteCall(self._number, method, arguments), self._life)
        return await self._worker.submit(work, what=what, deadline_s=deadline_s)


def _pickled(job: WorkerCall[_Work]) -> bytes:
    try:
        return pickle.dumps(job.work.call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{job.what} cannot run in a worker process",
            got=error,
            expected="a factory, options and tasks that can be pickled, importable by name",
            hint="move the environment into a module of its own, or set environment.isolation to thread",
        ) from error


async def _exchange(process: Process, message: bytes) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(message)
    await process.stdin.drain()
    (length,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
    return pickle.loads(await process.stdout.readexactly(length))
