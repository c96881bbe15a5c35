"""Worker processes: for environments that crash, hang or hold the interpreter lock. A process that dies is replaced.

`ProcessWorker` starts the program below, and exchanges calls for replies with it. The program reads calls from standard
input and writes replies to the original standard output.

Everything that environments print goes to standard error. On Linux the program consists of two processes: the
supervisor, which the trainer started, and its child, the worker, which runs the environments. When the trainer or the
worker ends for any reason, or at SIGTERM, the supervisor kills all processes that the environments started, in any
session.

    python -P -c START TRAINER_PID SEARCH_PATH

The program has the trainer's module search path (a JSON list), so that it finds the user's modules and no file in the
current folder hides an installed package that the trainer uses.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import itertools
import json
import logging
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from types import FrameType
from typing import Any, BinaryIO, NoReturn, TypeAlias

from agentrl.env import AnyEnv, run_coroutine
from agentrl.errors import (
    AgentRLError,
    EnvironmentFailure,
    ToolError,
    UsageError,
    WrongReturnValue,
    described_error,
    failure_of,
)
from agentrl.errors.foreign import end_forked_copy
from agentrl.remote.env_methods import CALL_TOOL, RemoteTool, ResetResult
from agentrl.rollout.env_workers import EnvAdapter, EnvBackend, SerialWorker, WorkerCall
from agentrl.sandbox.orphan_guard import without_mark
from agentrl.sandbox.supervisor import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    kill_tree,
    process_parents,
    processes_below,
    send_signal,
)

START = f"""
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from {__name__} import main
main(int(sys.argv[1]))
"""
WorkerMessage: TypeAlias = tuple[int, str, tuple[Any, ...]]
"""Message to the process: number of an environment, method of its `EnvAdapter` or `MAKE`, arguments."""
MAKE, UNREADABLE = "make", "unreadable"
HEADER = struct.Struct("<Q")
"""Format of the length in bytes of the pickled reply that follows."""
MAX_REPLY_BYTES = 256 * 2**20
"""Maximum number of bytes of a pickled reply; a larger reply is an error of the environment."""
REAP_MS = 10_000
"""Milliseconds between two searches for dead processes that the environments left behind."""
WORKER_KILL_S = 10.0
"""Maximum number of seconds to wait for the end of killed processes; one may hang in the kernel."""
SUPERVISOR_END_S = WORKER_KILL_S + 2.0
"""Seconds that a worker's supervisor has to end its processes and itself before all of them are killed."""
_EXPECTED = "a factory, options and tasks that can be pickled and imported by name"
_HINT = "move the environment into its own module, or set environment.isolation to thread"
logger = logging.getLogger(__name__)


class _StopSignal(BaseException):
    """Signal SIGTERM from the trainer."""


def main(trainer: int) -> None:
    """Serve calls until standard input ends; on Linux in a child process."""
    if sys.platform == "linux":
        fork_worker(trainer)
    serve()


def fork_worker(trainer: int) -> None:
    """Fork a worker process, in which this function returns; this process becomes the supervisor and never returns."""
    supervisor = os.getpid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)  # so that a stopped supervisor notices the end of the trainer
    trainer_fd = os.pidfd_open(trainer)
    if os.getppid() != trainer:
        os._exit(1)
    worker = os.fork()
    if worker:
        _supervise(worker, trainer_fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.close(trainer_fd)
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
        os._exit(1)


def _supervise(worker: int, trainer: int) -> NoReturn:
    """Wait until the worker or the trainer ends, or for SIGTERM; then kill the remaining processes and exit."""
    code: int | None = None
    with suppress(_StopSignal):
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)  # only the worker uses the pipes
        os.dup2(nothing, 1)
        poll = select.poll()
        for descriptor in (trainer, os.pidfd_open(worker)):
            poll.register(descriptor, select.POLLIN)
        while code is None and trainer not in {descriptor for descriptor, _ in poll.poll(REAP_MS)}:
            code = _reap(worker)
    deadline = time.monotonic() + WORKER_KILL_S
    while time.monotonic() < deadline:
        left = processes_below({os.getpid()}, process_parents()) - {os.getpid()}
        if not left:
            break
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stop first, so that no process can fork
            for process in left:
                send_signal(process, number)
        time.sleep(0.005)
        _reap(worker)
    os._exit(0 if code is None else code if code >= 0 else 128 - code)


def _reap(worker: int) -> int | None:
    """Reap dead processes; return the exit code of the worker if it is among them."""
    code = None
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == worker:
                code = os.waitstatus_to_exitcode(found[1])
    return code


def _stop(number: int, frame: FrameType | None) -> None:
    for handled in (signal.SIGTERM, signal.SIGINT):
        signal.signal(handled, signal.SIG_IGN)
    raise _StopSignal


def serve() -> None:
    """Serve calls until standard input ends."""
    calls, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # environments that read or print must not touch the pipes
    os.dup2(2, 1)
    inbox: SimpleQueue[WorkerMessage] = SimpleQueue()
    threading.Thread(target=_read, args=(calls, inbox), daemon=True).start()
    adapters: dict[int, EnvAdapter] = {}
    loop, process = asyncio.new_event_loop(), os.getpid()
    while True:
        reply = _serve(loop, adapters, inbox.get())
        end_forked_copy(process)
        _reply(replies, reply)


def _read(calls: BinaryIO, inbox: SimpleQueue[WorkerMessage]) -> None:
    while True:
        try:
            inbox.put(pickle.load(calls))
        except EOFError:
            os._exit(0)
        except BaseException as error:
            inbox.put((-1, UNREADABLE, (described_error(error),)))


def _serve(
    loop: asyncio.AbstractEventLoop, adapters: dict[int, EnvAdapter], message: WorkerMessage
) -> tuple[bool, Any]:
    try:
        return True, _perform(loop, adapters, message)
    except AgentRLError as error:
        return False, (type(error), str(error), None)
    except BaseException as error:  # nothing cancels or interrupts this process, so the environment raised it
        failure = failure_of(EnvironmentFailure, "", error)
        kind = WrongReturnValue if isinstance(error, WrongReturnValue) else EnvironmentFailure
        return False, (kind, failure.got, failure.hint)


def _perform(loop: asyncio.AbstractEventLoop, adapters: dict[int, EnvAdapter], message: WorkerMessage) -> Any:
    number, method, arguments = message
    if method == MAKE:
        adapters[number] = EnvAdapter(*arguments)
        return None
    if method == UNREADABLE:
        raise UsageError("a worker process cannot read the call", got=arguments[0], expected=_EXPECTED, hint=_HINT)
    adapter = adapters[number]
    work = adapter.call(method, *arguments)
    in_loop = adapter.is_async or method == CALL_TOOL.name
    result = loop.run_until_complete(work) if in_loop else run_coroutine(work)  # its code may call asyncio.run()
    if method == "close":
        del adapters[number]
    if isinstance(result, ResetResult):
        return dataclasses.replace(result, tools=tuple(RemoteTool.describe(tool) for tool in result.tools))
    return result


def _reply(replies: BinaryIO, reply: tuple[bool, Any]) -> None:
    try:
        message = pickle.dumps(reply)
    except BaseException as error:
        text = f"the returned value cannot be sent to the runtime: {described_error(error)}"
        message = pickle.dumps((False, (EnvironmentFailure, text, None)))
    if len(message) > MAX_REPLY_BYTES:
        text = f"the returned value has {len(message):,} bytes, expected at most {MAX_REPLY_BYTES:,}"
        message = pickle.dumps((False, (EnvironmentFailure, text, None)))
    replies.write(HEADER.pack(len(message)) + message)
    replies.flush()


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
            kind, text, hint = value
            if issubclass(kind, UsageError | ToolError):  # the user or the policy reads it
                raise kind(text)
            if issubclass(kind, WrongReturnValue):
                raise failure_of(EnvironmentFailure, job.what, kind(text))
            raise kind(f"{job.what} failed", got=text, hint=hint)
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
            code = await asyncio.wait_for(process.wait(), SUPERVISOR_END_S)
            await _close_pipe(process)
            return code
        kill_tree(process.pid)
    logger.warning("worker process %d does not end although it was killed", process.pid)
    return None


async def _close_pipe(process: Process) -> None:
    """Close the pipe from an ended process, which stays open if its replies are not read to the end."""
    process._transport.close()  # type: ignore[attr-defined]  # asyncio has no public way
    await asyncio.sleep(0)  # in which asyncio closes it


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
            expected=_EXPECTED,
            hint=_HINT,
        ) from error


async def _exchange(process: Process, message: bytes) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(message)
    await process.stdin.drain()
    (length,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
    return pickle.loads(await process.stdout.readexactly(length))
