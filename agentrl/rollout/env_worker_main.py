"""Program of a worker process: reads calls from standard input and writes replies to the original standard output.

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
from agentrl.errors.foreign import end_forked_copy
from agentrl.remote.env_methods import RemoteTool, ResetResult
from agentrl.rollout.env_adapter import EnvAdapter
from agentrl.sandbox.supervisor import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
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
LARGEST_REPLY = 256 * 2**20
"""Maximum number of bytes of a pickled reply; a larger reply is an error of the environment."""
REAP_MS = 10_000
"""Milliseconds between two searches for dead processes that the environments left behind."""
WORKER_KILL_S = 10.0
"""Maximum number of seconds to wait for the end of killed processes; one may hang in the kernel."""


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
    with contextlib.suppress(_StopSignal):
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
    with contextlib.suppress(ChildProcessError):
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
        reply = loop.run_until_complete(_serve(adapters, inbox.get()))
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


async def _serve(adapters: dict[int, EnvAdapter], message: WorkerMessage) -> tuple[bool, Any]:
    try:
        return True, await _perform(adapters, message)
    except AgentRLError as error:
        return False, (type(error), str(error))
    except BaseException as error:  # nothing cancels or interrupts this process, so the environment raised it
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
        text = f"the returned value cannot be sent to the runtime: {described_error(error)}"
        message = pickle.dumps((False, (EnvironmentFailure, text)))
    if len(message) > LARGEST_REPLY:
        text = f"the returned value has {len(message):,} bytes, expected at most {LARGEST_REPLY:,}"
        message = pickle.dumps((False, (EnvironmentFailure, text)))
    replies.write(HEADER.pack(len(message)) + message)
    replies.flush()
