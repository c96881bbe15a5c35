"""The program of a worker process: reads calls from standard input, writes replies to what was standard output.

Whatever environments print goes to standard error. On Linux the program is two processes: a keeper, which is the one
that the trainer started, and below it the worker, which runs the environments. When the trainer or the worker is gone,
however it died, or at SIGTERM, the keeper kills everything that the environments started, in whatever session it is.

    python -m agentrl.rollout.env_worker_main TRAINER_PID
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
from queue import SimpleQueue
from types import FrameType
from typing import Any, BinaryIO, NoReturn, TypeAlias

from agentrl.errors import AgentRLError, EnvironmentFailure, described_error
from agentrl.remote.env_methods import RemoteTool, ResetResult
from agentrl.rollout.env_adapter import EnvAdapter
from agentrl.sandbox.supervisor import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    process_parents,
    processes_below,
    send_signal,
)

WorkerMessage: TypeAlias = tuple[int, str, tuple[Any, ...]]
"""Message to the process: the number of an environment, a method of its `EnvAdapter` or `MAKE`, and arguments."""
MAKE, UNREADABLE = "make", "unreadable"
HEADER = struct.Struct("<Q")
"""Length of the pickled reply that follows."""
LARGEST_REPLY = 256 * 2**20
"""Maximum number of bytes of a pickled reply; a larger one is an error of the environment."""
REAP_MS = 10_000
"""Milliseconds between two looks for dead processes that the environments left behind."""
KILL_S = 10.0
"""Seconds that killed processes get to vanish; one that hangs in the kernel is left to it."""


class _Stopped(BaseException):
    """The trainer sent SIGTERM."""


def main(trainer: int) -> None:
    """Serve calls until standard input ends."""
    if sys.platform == "linux":
        fork_worker(trainer)
    serve()


def fork_worker(trainer: int) -> None:
    """Return in a new worker process; this process stays its keeper, and exits with the worker's code."""
    keeper = os.getpid()
    signal.signal(signal.SIGTERM, _stop)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    watched = os.pidfd_open(trainer)
    if os.getppid() != trainer:
        os._exit(1)
    worker = os.fork()
    if worker:
        _keep(worker, watched)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.close(watched)
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != keeper:
        os._exit(1)


def _keep(worker: int, trainer: int) -> NoReturn:
    """Wait until the worker or the trainer is gone, or for SIGTERM; then kill what is left and exit."""
    code: int | None = None
    with contextlib.suppress(_Stopped):
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)  # the pipes are the worker's alone
        os.dup2(nothing, 1)
        poll = select.poll()
        for descriptor in (trainer, os.pidfd_open(worker)):
            poll.register(descriptor, select.POLLIN)
        while code is None and trainer not in {descriptor for descriptor, _ in poll.poll(REAP_MS)}:
            code = _reap(worker)
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        left = processes_below({os.getpid()}, process_parents()) - {os.getpid()}
        if not left:
            break
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that nothing forks any more
            for process in left:
                send_signal(process, number)
        time.sleep(0.005)
        _reap(worker)
    os._exit(0 if code is None else code if code >= 0 else 128 - code)


def _reap(worker: int) -> int | None:
    """Reap dead processes; return the exit code of the worker if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == worker:
                code = os.waitstatus_to_exitcode(found[1])
    return code


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stopped


def serve() -> None:
    """Serve calls until standard input ends."""
    calls, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # environments that read or print must not meet the pipes
    os.dup2(2, 1)
    sys.path[:] = pickle.load(calls)
    inbox: SimpleQueue[WorkerMessage] = SimpleQueue()
    threading.Thread(target=_read, args=(calls, inbox), daemon=True).start()
    adapters: dict[int, EnvAdapter] = {}
    loop = asyncio.new_event_loop()
    while True:
        _reply(replies, loop.run_until_complete(_serve(adapters, inbox.get())))


def _read(calls: BinaryIO, inbox: SimpleQueue[WorkerMessage]) -> None:
    while True:
        try:
            inbox.put(pickle.load(calls))
        except EOFError:
            os._exit(0)
        except BaseException as error:
            inbox.put((-1, UNREADABLE, (described_error(error),)))


async def _serve(adapters: dict[int, EnvAdapter], message: WorkerMessage) -> tuple[bool, Any]:
    try:
        return True, await _perform(adapters, message)
    except AgentRLError as error:
        return False, (type(error), str(error))
    except BaseException as error:  # nobody cancels or interrupts this process: it is the environment's own
        return False, (EnvironmentFailure, described_error(error))


async def _perform(adapters: dict[int, EnvAdapter], message: WorkerMessage) -> Any:
    number, method, arguments = message
    if method == MAKE:
        adapters[number] = EnvAdapter(*arguments)
        return None
    if method == UNREADABLE:
        raise EnvironmentFailure(f"the worker cannot read the call ({arguments[0]})")
    result = await adapters[number].call(method, *arguments)
    if method == "close":
        del adapters[number]
    if isinstance(result, ResetResult):
        return dataclasses.replace(result, tools=tuple(RemoteTool.describe(tool) for tool in result.tools))
    return result


def _reply(replies: BinaryIO, reply: tuple[bool, Any]) -> None:
    try:
        message = pickle.dumps(reply)
    except BaseException as error:
        text = f"what it returned cannot be sent to the runtime: {described_error(error)}"
        message = pickle.dumps((False, (EnvironmentFailure, text)))
    if len(message) > LARGEST_REPLY:
        text = f"what it returned has {len(message):,} bytes, expected at most {LARGEST_REPLY:,}"
        message = pickle.dumps((False, (EnvironmentFailure, text)))
    replies.write(HEADER.pack(len(message)) + message)
    replies.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
