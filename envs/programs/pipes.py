"""Exchange of JSON lines with a program in a sandbox."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from importlib.resources import files
from types import TracebackType
from typing import Any, Self

from agentrl.errors import SandboxError
from agentrl.errors.deadlines import async_boundary
from agentrl.sandbox import Limits, Sandbox, SandboxFileError, SandboxProcess
from agentrl.sandbox.interpreter import require_life

from . import inside

JUDGE = ".judge"
"""Folder of a sandbox with the programs of `inside`."""
MAX_LINE_BYTES = 512 * 1024
"""Maximum bytes of a line; a longer one is not an answer."""
PROGRAM_STOP_S = 5.0
PROGRAM_START_S = 20.0
"""Seconds to start and fill a sandbox."""
TICK_S = 0.1
"""Seconds of a blocked event loop that count towards a time limit, per block."""
SLOW_S = 0.5
"""Duration in seconds of a trivial command at which the machine counts as slow."""
MAX_RUN_S = 20.0
"""Maximum seconds of a program on a slow machine; below the usual deadline of a step (`environment.step_timeout_s`)."""


class ProgramFailure(Exception):
    """The program ended, was killed, or sent invalid messages, which is the fault of the solution; see the message."""


class DeadlineExceeded(Exception):
    """The program took too long although the sandbox works, so the solution is at fault."""


async def send_programs(sandbox: Sandbox) -> None:
    """Write the programs of `inside` into a sandbox."""
    for file in files(inside).iterdir():
        if file.name.endswith(".py"):
            await sandbox.write(f"{JUDGE}/inside/{file.name}", file.read_bytes())


async def _has_programs(sandbox: Sandbox) -> bool:
    """Return True if a sandbox still has exactly the programs that it was sent."""
    try:
        for file in files(inside).iterdir():
            if file.name.endswith(".py") and await sandbox.read(f"{JUDGE}/inside/{file.name}") != file.read_bytes():
                return False
        return {entry.name for entry in await sandbox.list(JUDGE)} <= {"inside", "program.py"}
    except SandboxFileError:
        return False


async def begin(sandbox: Sandbox, prepare: Callable[[Sandbox], Awaitable[None]] | None) -> None:
    """Start a sandbox and fill it.

    Raises:
        SandboxError: the sandbox does not start, or takes too long.
    """
    async with async_boundary(SandboxError, "starting a sandbox", deadline_s=PROGRAM_START_S):
        await sandbox.start()
        if prepare is not None:
            await prepare(sandbox)


class Pipe:
    """A program of `inside` that runs in a sandbox.

    Args:
        sandbox: A started sandbox to which the programs were sent.
        program: Name of the program's module.
        limits: Resource limits of the program.
    """

    def __init__(self, sandbox: Sandbox, program: str, limits: Limits | None = None) -> None:
        self.sandbox = sandbox
        self._program = program
        self._limits = limits
        self._process: SandboxProcess | None = None

    async def __aenter__(self) -> Self:
        command = ["python3", "-B", "-m", f"inside.{self._program}"]
        async with async_boundary(SandboxError, "starting Python in a sandbox", deadline_s=PROGRAM_START_S):
            self._process = await self.sandbox.spawn(command, cwd=JUDGE, limits=self._limits)
            if (await self._process.read_line()).endswith(b"\n"):
                return self
            ended = await self._process.wait()
            is_intact = await _has_programs(self.sandbox)
        if not is_intact:
            raise ProgramFailure("an earlier program changed the folder of the tests")
        errors = ended.stderr.decode(errors="replace")[-300:].strip()
        raise SandboxError("Python does not start in a sandbox", got=f"exit code {ended.exit_code} {errors}")

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            async with async_boundary(SandboxError, "stopping a program in a sandbox", deadline_s=PROGRAM_STOP_S):
                await process.kill()

    async def tell(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            ProgramFailure: the program has ended.
            SandboxError: the sandbox is lost.
        """
        try:
            await self._running.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError as error:
            await require_life(self.sandbox)
            raise ProgramFailure("the program ended early") from error

    async def hear(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            ProgramFailure: the program has ended, or its message is not valid.
            SandboxError: the sandbox is lost.
        """
        line = await self._running.read_line(longest=MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            await require_life(self.sandbox)
            raise ProgramFailure("the program ended early")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProgramFailure("the program's answer cannot be read") from error
        if not isinstance(message, dict):
            raise ProgramFailure("the program's answer cannot be read")
        return message

    @property
    def _running(self) -> SandboxProcess:
        if self._process is None:
            raise RuntimeError("enter the pipe before it is used")
        return self._process


async def _sleep_unblocked(seconds: float) -> None:
    """Sleep until the event loop was free to run for this many seconds."""
    ticks = max(1, math.ceil(seconds / TICK_S))
    for _ in range(ticks):
        await asyncio.sleep(seconds / ticks)


class Deadline:
    """Time limit of a program inside an ``async with`` block, which does not count waiting for a busy machine.

    Time in which this process's event loop is blocked does not count: the local engine blocks it for a second and more
    per step. When `seconds` are over, a trivial command runs in the sandbox. If it takes longer than `SLOW_S`, the
    program may have waited for the machine, so it gets the same time again, up to `MAX_RUN_S` in all.

    Args:
        sandbox: The sandbox of the program.
        seconds: Time limit of the whole block.

    Raises:
        DeadlineExceeded: the time is over, and the sandbox works.
        SandboxError: the time is over, and the sandbox does not answer.
    """

    def __init__(self, sandbox: Sandbox, seconds: float) -> None:
        self._sandbox = sandbox
        self._seconds = seconds
        self._scope = asyncio.timeout(None)
        self._watch: asyncio.Task[Exception] | None = None

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._watch = asyncio.create_task(self._expire())

    async def _expire(self) -> Exception:
        """Cancel the block once its time is over; return the error to raise."""
        error: Exception = DeadlineExceeded(f"it did not end within {self._seconds:g} seconds")
        total = 0.0
        try:
            while True:
                await _sleep_unblocked(self._seconds)
                took = await self._probe()
                total += self._seconds + took
                if took < SLOW_S or total + self._seconds > MAX_RUN_S:
                    break
        except Exception as lost:  # the block must end, whatever the sandbox raises
            error = lost
        self._scope.reschedule(asyncio.get_running_loop().time())
        return error

    async def _probe(self) -> float:
        """Run a trivial command in the sandbox; return the seconds that it took while the event loop was free."""
        probe, took = asyncio.create_task(require_life(self._sandbox)), 0.0
        try:
            while not (await asyncio.wait([probe], timeout=TICK_S))[0]:
                took += TICK_S
            await probe
        finally:
            probe.cancel()
        return took

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch, self._watch = self._watch, None
        if watch is not None and not watch.done():
            watch.cancel()
            await asyncio.wait([watch])
        try:
            await self._scope.__aexit__(error_type, error, trace)
        except TimeoutError as late:
            if watch is None or watch.cancelled():
                raise
            raise watch.result() from late
