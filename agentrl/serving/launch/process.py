"""One server process: started under a guard, watched until ready, ended with everything that it started.

- The end of a server's log, as people want to read it.
- What starts a server: a command line and the variables that it needs besides this process's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import aiohttp

from agentrl.errors import EngineError, UsageError
from agentrl.serving.launch import guard as guard_program

READ_BYTES = 65_536
"""Bytes at the end of a log that are looked at."""
LONGEST_LINE = 300
"""Characters of a line that are shown."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def last_lines(log: Path, count: int, *, start: int = 0) -> list[str]:
    """The last lines that are not empty, without colours; of a progress bar its last state.

    Args:
        log: The file; one that is not there has no lines.
        count: Most lines.
        start: Byte from which the file is read.
    """
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(start, end - READ_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = [_ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in text.split("\n")]
    return [line[:LONGEST_LINE] for line in lines if line][-count:]


THIS_MACHINE = "127.0.0.1"
"""The address of servers that nobody reaches from elsewhere."""

RETURN_ROUTES = "--enable-return-routed-experts"
"""Lets vLLM and SGLang alike tell which experts tokens went to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """Command line of one server, made by a pure function of its engine (``launch_command(...)``)."""

    argv: list[str]
    """The interpreter and its arguments, with the port and the model."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables set on top of this process's environment."""
    host: str = THIS_MACHINE
    """Address on which it listens."""
    health: str = "/health"
    """Path that answers 200 once the server is ready."""


CommandMaker = Callable[[int, Sequence[int]], LaunchCommand]
"""The command of a server, from its port and the positions of its GPUs (see `agentrl.serving.launch.resources`)."""


GRACE_S = 5.0
"""Seconds that a server gets to end by itself before it is killed."""
GUARD_S = 15.0
"""Seconds that the guard gets after the grace; then it is killed, too."""
POLL_S = 0.2
PROBE_S = 5.0
"""Deadline of one question whether a server is ready."""
SHOWN_LINES = 15
"""Lines of the log in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """How far a server's start is."""

    name: str
    seconds: float
    """Since it was started."""
    line: str
    """The last line of its log; may be empty."""


class ServerExited(EngineError):
    """A server ended before it was ready."""


class ServerProcess:
    """A server that runs, ready or not. Ended by `close`, and by the end of this process however that comes.

    Args:
        command: What to run.
        name: What to call it in messages.
        port: The port that the command names.
        log: File to append its output to; its folder is made.
        grace_s: Seconds that it gets to end by itself.

    Attributes:
        url: Its base address.
        pid: Its first process, which leads a session of its own.

    Raises:
        UsageError: not on Linux, or the command's program cannot be run.
    """

    def __init__(self, command: LaunchCommand, *, name: str, port: int, log: Path, grace_s: float = GRACE_S) -> None:
        if sys.platform != "linux":
            raise UsageError(
                "servers can be launched on Linux only",
                got=sys.platform,
                hint="start the servers yourself and give their addresses in engine.servers",
            )
        self.name, self.port, self.log = name, port, log
        self.url = f"http://{command.host}:{port}"
        self._health_url = f"{self.url}{command.health}"
        self._grace_s = grace_s
        self._started = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._guard = _start_guard(command, output.fileno(), grace_s)
        self.pid = self._hear_pid(command.argv[0])

    def _hear_pid(self, program: str) -> int:
        assert self._guard.stdout is not None
        with self._guard.stdout as words:
            word, _, rest = words.readline().decode(errors="replace").strip().partition(" ")
        if word == "started":
            return int(rest)
        _instruct(self._guard, b"k")
        self._guard.wait()
        said = rest or "\n".join(self.last_lines())
        raise UsageError(f"{self.name} cannot be started", got=said, expected=f"a program at {program}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def code(self) -> int | None:
        """Its exit code, 128 + N after a signal N; ``None`` while it, or anything that it started, runs."""
        was_running = self._guard.returncode is None
        code = self._guard.poll()
        if code is not None and was_running:
            self._has_ended(guard_was_killed=code < 0)
        return code if code is None or code >= 0 else 128 - code

    @property
    def seconds(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._started

    def last_lines(self, count: int = SHOWN_LINES) -> list[str]:
        """The last lines that this process wrote."""
        return last_lines(self.log, count, start=self._log_start)

    async def wait_ready(
        self, *, deadline_s: float, on_progress: Callable[[StartProgress], None] | None = None
    ) -> None:
        """Wait until its health route answers 200; the server goes on in any case.

        Args:
            deadline_s: Seconds to wait at most, from now.
            on_progress: Called a few times a second.

        Raises:
            ServerExited: it ended.
            EngineError: the deadline passed.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s), aiohttp.ClientSession() as session:
                while not await self._is_ready(session):
                    if self.code is not None:
                        raise self._failure(ServerExited, f"exit code {self.code}", "a server that becomes ready")
                    if on_progress is not None:
                        line = next((line for line in reversed(self.last_lines()) if not line.startswith(" ")), "")
                        on_progress(StartProgress(name=self.name, seconds=self.seconds, line=line))
                    await asyncio.sleep(POLL_S)
                return
        raise self._failure(
            EngineError, f"no answer of {self._health_url}", f"one within {deadline_s:g} s (engine.start_timeout_s)"
        )

    async def wait(self) -> int:
        """Wait until it has ended and all its processes are gone; returns `code`."""
        while (code := self.code) is None:
            await _ended(self._guard.pid)
        return code

    async def close(self, *, at_once: bool = False) -> None:
        """End it and everything that it started; idempotent.

        Args:
            at_once: Kill it without grace.
        """
        _instruct(self._guard, b"k" if at_once else b"e")
        try:
            async with asyncio.timeout(self._grace_s + GUARD_S):
                await self.wait()
        except TimeoutError:
            self._guard.kill()
            await self.wait()

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        limit = aiohttp.ClientTimeout(total=PROBE_S)
        try:
            async with session.get(self._health_url, timeout=limit) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _has_ended(self, *, guard_was_killed: bool) -> None:
        _instruct(self._guard, b"e")
        if guard_was_killed:  # the first process died with it, the others have to follow
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _failure(self, kind: type[EngineError], got: str, expected: str) -> EngineError:
        said = "\n  ".join(self.last_lines()) or "(nothing)"
        return kind(
            f"{self.name} did not start", got=got, expected=expected, hint=f"its log, {self.log}, ends with:\n  {said}"
        )


def _start_guard(command: LaunchCommand, output: int, grace_s: float) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-I", "-S", guard_program.__file__, str(os.getpid()), str(grace_s)]
    return subprocess.Popen(
        [*program, *command.argv],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
        env={**os.environ, **command.env},
        start_new_session=True,
    )


def _instruct(guard: subprocess.Popen[bytes], instruction: bytes) -> None:
    """Give the guard its last instruction, if it has none and still listens."""
    assert guard.stdin is not None
    if not guard.stdin.closed:
        with contextlib.suppress(BrokenPipeError), guard.stdin:
            guard.stdin.write(instruction)


async def _ended(pid: int) -> None:
    """Wait for the end of a child that nobody has reaped."""
    ended = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
