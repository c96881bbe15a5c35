"""A worker process for environments that crash, hang, or hold the interpreter lock; it is replaced when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import struct
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.env import AnyEnv
from agentrl.errors import EnvironmentFailure, ToolError, UsageError
from agentrl.rollout.serial_worker import Job, SerialWorker

HEADER = struct.Struct("<Q")
"""Length of the pickled reply that follows."""
LARGEST_REPLY = 256 * 2**20
"""Maximum number of bytes of a pickled reply; a larger one is an error of the environment."""


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """What is sent to the process: a method of a resident, or ``make``."""

    resident: int
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
    ) -> int:
        """Make an environment in the process and give its number."""
        number = next(self._numbers)
        work = _Work(RemoteCall(number, "make", (factory, dict(options))), None)
        await self.submit(work, what=what, deadline_s=deadline_s)
        return number

    async def call(
        self, resident: int, method: str, arguments: tuple[Any, ...], *, life: int, what: str, deadline_s: float
    ) -> Any:
        """Call a method of a resident that was made in the process's life `life`."""
        work = _Work(RemoteCall(resident, method, arguments), life)
        return await self.submit(work, what=what, deadline_s=deadline_s)

    async def execute(self, job: Job[_Work]) -> Any:
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
            "agentrl.rollout.process_main",
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


def _pickled(job: Job[_Work]) -> bytes:
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
