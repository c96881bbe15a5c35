"""Server processes of one engine: started under a guard, watched until ready, restarted one by one, ended together."""

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import aiohttp

from agentrl.errors import EngineError, UsageError
from agentrl.serving.launch import guard as guard_program
from agentrl.serving.launch.resources import (
    PortReservation,
    is_free,
    reserve_exactly,
    reserve_port,
    usable_gpus,
    visible_devices,
)

READ_BYTES = 65_536
"""Bytes at the end of a log that are looked at."""
LONGEST_LINE = 300
"""Characters of a line that are shown."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def last_lines(log: Path, count: int, *, start: int = 0) -> list[str]:
    """Return at most `count` last lines that are not empty, without colours, after byte `start` of a log.

    A progress bar counts as one line, in its last state; a file that does not exist has no lines.
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
"""Address of servers that only this machine reaches."""

RETURN_ROUTES = "--enable-return-routed-experts"
"""Lets vLLM and SGLang report the experts of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """Command line of one server, made by its engine's ``launch_command``."""

    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables set on top of this process's environment."""
    host: str = THIS_MACHINE
    """Address on which it listens."""


CommandMaker = Callable[[int, Sequence[int]], LaunchCommand]
"""The command of a server, from its port and the positions of its GPUs (see `agentrl.serving.launch.resources`)."""


GRACE_S = 5.0
"""Seconds that a server gets to end by itself before it is killed."""
GUARD_S = 15.0
"""Seconds that the guard gets after the grace; then it is killed, too."""
POLL_S = 0.2
HEALTH = "/health"
"""Route that answers 200 once a server is ready."""
PROBE_S = 5.0
"""Deadline of one question whether a server is ready."""
SHOWN_LINES = 15
"""Lines of the log in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """Progress of a server's start."""

    name: str
    seconds: float
    """Since it was started."""
    line: str
    """The last line of its log; may be empty."""


class ServerExited(EngineError):
    """A server ended before it was ready."""


class ServerProcess:
    """A server that runs, ready or not. Ended by `close`, and when this process ends in any way.

    Args:
        command: Its command line.
        name: Name in messages.
        port: The port in the command.
        log: File to which its output is appended.
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
        self._health_url = self.url + HEALTH
        self._grace_s = grace_s
        self._started = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._guard = _start_guard(command, output.fileno(), grace_s)
        self.pid = self._read_pid(command.argv[0])

    def _read_pid(self, program: str) -> int:
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
        """Exit code, 128 + N after a signal N; ``None`` while the server or anything that it started runs."""
        was_running = self._guard.returncode is None
        code = self._guard.poll()
        if code is not None and was_running:
            self._has_ended(guard_was_killed=code < 0)
        return code if code is None or code >= 0 else 128 - code

    def last_lines(self, count: int = SHOWN_LINES) -> list[str]:
        """Return the last lines that this process wrote."""
        return last_lines(self.log, count, start=self._log_start)

    async def wait_ready(
        self, *, deadline_s: float, on_progress: Callable[[StartProgress], None] | None = None
    ) -> None:
        """Wait until its health route answers 200; `on_progress` is called a few times a second.

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
                        seconds = time.monotonic() - self._started
                        on_progress(StartProgress(name=self.name, seconds=seconds, line=line))
                    await asyncio.sleep(POLL_S)
                return
        raise self._failure(
            EngineError, f"no answer of {self._health_url}", f"one within {deadline_s:g} s (engine.start_timeout_s)"
        )

    async def wait(self) -> int:
        """Wait until it has ended and all its processes are gone; returns `code`."""
        while (code := self.code) is None:
            await _wait_for_exit(self._guard.pid)
        return code

    async def close(self, *, at_once: bool = False) -> None:
        """End it and everything that it started, with `at_once` without grace; idempotent."""
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
    """Give the guard its last instruction, if it had none and still runs."""
    assert guard.stdin is not None
    if not guard.stdin.closed:
        with contextlib.suppress(BrokenPipeError), guard.stdin:
            guard.stdin.write(instruction)


async def _wait_for_exit(pid: int) -> None:
    """Wait for the end of a child."""
    ended = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


PORT_ATTEMPTS = 3
"""Ports that are tried for a server while other programs take them first."""


class Launcher:
    """Launcher of servers called ``server-0``, ``server-1``, …; also an async context manager.

    Args:
        make_command: Makes the command of a server, from its port and GPUs.
        gpus: Positions of each server's GPUs (`agentrl.serving.launch.resources.assign_gpus`), one item per server.
        logs: Folder of their logs, ``server-0.log`` and so on; a restarted server goes on in its log.
        start_timeout_s: Seconds that a server gets to become ready.
        on_progress: Called a few times a second for each server that is starting.
        ports: Port of each server at its first start; free ones when left out.
        names: Other names.
    """

    def __init__(
        self,
        make_command: CommandMaker,
        *,
        gpus: Sequence[Sequence[int]],
        logs: Path,
        start_timeout_s: float,
        on_progress: Callable[[StartProgress], None] | None = None,
        ports: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self._make_command = make_command
        names = names or [f"server-{number}" for number in range(len(gpus))]
        self._gpus = dict(zip(names, gpus, strict=True))
        self._logs = logs
        self._start_timeout_s = start_timeout_s
        self._on_progress = on_progress
        self._asked_ports = dict(zip(self._gpus, ports, strict=True)) if ports is not None else {}
        self._servers: dict[str, ServerProcess] = {}
        self._reserved: dict[str, PortReservation] = {}
        self._closed = False

    @property
    def servers(self) -> dict[str, ServerProcess]:
        """The servers by name, including those that are starting or have ended."""
        return dict(self._servers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> list[ServerProcess]:
        """Start all servers and wait until they are ready; when one fails, all are ended.

        Raises:
            UsageError: a port that was asked for is in use, or a program cannot be run.
            EngineError: a server ended, or was not ready in time; holds the end of its log.
        """
        starts = [asyncio.create_task(self._start(name, self._asked_ports.get(name))) for name in self._gpus]
        try:
            return list(await asyncio.gather(*starts))
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close()
            raise

    async def restart(self, name: str) -> ServerProcess:
        """Kill what is left of a server, and start it again, on another port and the same GPUs."""
        await self._end(name, at_once=True)
        return await self._start(name, None)

    async def close(self) -> None:
        """End all servers with everything that they started; idempotent."""
        self._closed = True
        await asyncio.gather(*(self._end(name, at_once=False) for name in list(self._servers)))

    async def _start(self, name: str, asked_port: int | None, attempts: int = PORT_ATTEMPTS) -> ServerProcess:
        server = self._launch(name, asked_port)
        try:
            await server.wait_ready(deadline_s=self._start_timeout_s, on_progress=self._on_progress)
        except EngineError as error:
            await server.close(at_once=True)
            lost_its_port = isinstance(error, ServerExited) and not is_free(server.port)
            if not lost_its_port or asked_port is not None or attempts == 1:
                raise
            return await self._start(name, None, attempts - 1)
        return server

    def _launch(self, name: str, asked_port: int | None) -> ServerProcess:
        if self._closed:
            raise EngineError(f"{name} cannot be started", got="servers that are being ended")
        self._release(name)
        self._reserved[name] = reserve_port() if asked_port is None else reserve_exactly(asked_port)
        port = self._reserved[name].port
        gpus, log = self._gpus[name], self._logs / f"{name}.log"
        command = self._make_command(port, gpus)
        if gpus:
            command = replace(command, env={**command.env, **visible_devices(gpus, usable_gpus(os.environ))})
        server = self._servers[name] = ServerProcess(command, name=name, port=port, log=log)
        return server

    async def _end(self, name: str, *, at_once: bool) -> None:
        if (server := self._servers.get(name)) is not None:
            await server.close(at_once=at_once)
        self._release(name)

    def _release(self, name: str) -> None:
        if (reservation := self._reserved.pop(name, None)) is not None:
            reservation.release()
