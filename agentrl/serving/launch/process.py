"""Server processes of one engine: start under a guard, wait until ready, restart individually, end together."""

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
from agentrl.models.cores import divide_cores, pinned_thread
from agentrl.sandbox.orphan_guard import without_mark
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
"""Bytes that are read from the end of a log."""
MAX_LINE_CHARS = 300
"""Maximum characters shown of a line."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
THIS_MACHINE = "127.0.0.1"
"""Address of servers that are reachable from this machine only."""
SAFE_PATH = "PYTHONSAFEPATH"
"""Variable that keeps Python from importing from the current folder, so that a ``vllm.py`` there is harmless."""
RETURN_ROUTES = "--enable-return-routed-experts"
"""Option that makes vLLM and SGLang report the routed experts of tokens."""
SERVER_GRACE_S = 5.0
"""Seconds before a server that was asked to exit is killed."""
GUARD_S = 15.0
"""Seconds after the grace period before the guard is killed, too."""
READY_POLL_S = 0.2
HEALTH = "/health"
"""Route that returns 200 once a server is ready."""
READY_PROBE_S = 5.0
"""Timeout of one readiness check."""
SHOWN_LINES = 15
"""Lines of the log quoted in an error."""
PORT_ATTEMPTS = 3
"""Maximum starts of a server whose port was taken by another program."""


def last_lines(log: Path, count: int, *, start: int = 0) -> list[str]:
    """Return the last `count` non-empty lines after byte `start` of a log, without colour codes.

    A progress bar counts as one line, in its last state. A missing file has no lines.
    """
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(start, end - READ_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = [_ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in text.split("\n")]
    return [line[:MAX_LINE_CHARS] for line in lines if line][-count:]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """Command line of one server, built by its engine's ``launch_command``."""

    argv: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables added to those of this process."""
    host: str = THIS_MACHINE
    """Address on which the server listens."""


CommandMaker = Callable[[int, Sequence[int]], LaunchCommand]
"""Function that builds a server's command from its port and GPU positions (see `agentrl.serving.launch.resources`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """Progress of a server's start."""

    name: str
    seconds: float
    """Seconds since the start."""
    line: str
    """Last line of the server's log; may be empty."""


class ServerExited(EngineError):
    """A server exited before it was ready."""


class ServerProcess:
    """Running server process, ready or not. It ends with `close`, or when this process exits for any reason.

    Args:
        command: Command line of the server.
        name: Name in messages.
        port: Port in the command.
        log: File to which the server's output is appended.
        grace_s: Seconds before a server that was asked to exit is killed.

    Attributes:
        url: Base URL of the server.
        pid: PID of the server's first process, which leads its own session.

    Raises:
        UsageError: not on Linux, or the command's program cannot be run.
    """

    def __init__(
        self, command: LaunchCommand, *, name: str, port: int, log: Path, grace_s: float = SERVER_GRACE_S
    ) -> None:
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
        with self._guard.stdout as output:
            word, _, rest = output.readline().decode(errors="replace").strip().partition(" ")
        if word == "started":
            return int(rest)
        _instruct(self._guard, b"k")
        self._guard.wait()
        reason = rest or "\n".join(self.last_lines())
        raise UsageError(f"{self.name} cannot be started", got=reason, expected=f"a program at {program}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def code(self) -> int | None:
        """Exit code, 128 + N after signal N; ``None`` while the server or a process that it started is running."""
        was_running = self._guard.returncode is None
        code = self._guard.poll()
        if code is not None and was_running:
            self._has_ended(guard_was_killed=code < 0)
        return code if code is None or code >= 0 else 128 - code

    def last_lines(self, count: int = SHOWN_LINES) -> list[str]:
        """Return the last lines of this process's output."""
        return last_lines(self.log, count, start=self._log_start)

    async def wait_ready(
        self, *, deadline_s: float, on_progress: Callable[[StartProgress], None] | None = None
    ) -> None:
        """Wait until the health route returns 200, and call `on_progress` a few times per second.

        Raises:
            ServerExited: the server exited.
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
                    await asyncio.sleep(READY_POLL_S)
                return
        raise self._failure(
            EngineError, f"no answer from {self._health_url}", f"one within {deadline_s:g} s (engine.start_timeout_s)"
        )

    async def wait(self) -> int:
        """Wait until the server and all its processes have exited; returns `code`."""
        while (code := self.code) is None:
            await _wait_for_exit(self._guard.pid)
        return code

    async def close(self, *, at_once: bool = False) -> None:
        """End the server and all processes that it started; `at_once` kills them without a grace period. Idempotent."""
        _instruct(self._guard, b"k" if at_once else b"e")
        try:
            async with asyncio.timeout(self._grace_s + GUARD_S):
                await self.wait()
        except TimeoutError:
            self._guard.kill()
            await self.wait()

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        limit = aiohttp.ClientTimeout(total=READY_PROBE_S)
        try:
            async with session.get(self._health_url, timeout=limit) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _has_ended(self, *, guard_was_killed: bool) -> None:
        _instruct(self._guard, b"e")
        if guard_was_killed:  # the first process died with the guard, the others are still running
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _failure(self, kind: type[EngineError], got: str, expected: str) -> EngineError:
        end = "\n  ".join(self.last_lines()) or "(nothing)"
        return kind(
            f"{self.name} did not start", got=got, expected=expected, hint=f"its log, {self.log}, ends with:\n  {end}"
        )


def _start_guard(command: LaunchCommand, output: int, grace_s: float) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-I", "-S", guard_program.__file__, str(os.getpid()), str(grace_s)]
    return subprocess.Popen(
        [*program, *command.argv],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
        env=without_mark({**os.environ, **command.env}),
        start_new_session=True,
    )


def _instruct(guard: subprocess.Popen[bytes], instruction: bytes) -> None:
    """Send the guard the instruction to end the server, unless it was sent before or the guard has exited."""
    assert guard.stdin is not None
    if not guard.stdin.closed:
        with contextlib.suppress(BrokenPipeError), guard.stdin:
            guard.stdin.write(instruction)


async def _wait_for_exit(pid: int) -> None:
    """Wait until a child process exits."""
    ended = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


class Launcher:
    """Launcher of servers named ``server-0``, ``server-1``, …; also an async context manager.

    Args:
        make_command: Builds a server's command from its port and GPUs.
        gpus: Positions of each server's GPUs (`agentrl.serving.launch.resources.assign_gpus`), one item per server.
        cpus: Cores of the servers, which share them in equal parts; any by default.
        logs: Folder of the logs, ``server-0.log`` and so on; a restarted server appends to its log.
        start_timeout_s: Seconds before a server must be ready.
        on_progress: Called a few times per second for each server that is starting.
        ports: Port of each server at its first start; free ports by default.
        names: Names of the servers, in place of ``server-0`` and so on.
    """

    def __init__(
        self,
        make_command: CommandMaker,
        *,
        gpus: Sequence[Sequence[int]],
        cpus: Sequence[int] | None = None,
        logs: Path,
        start_timeout_s: float,
        on_progress: Callable[[StartProgress], None] | None = None,
        ports: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self._make_command = make_command
        names = names or [f"server-{number}" for number in range(len(gpus))]
        self._gpus = dict(zip(names, gpus, strict=True))
        self._cores = dict(zip(names, divide_cores(cpus, len(gpus)), strict=True))
        self._logs = logs
        self._start_timeout_s = start_timeout_s
        self._on_progress = on_progress
        self._asked_ports = dict(zip(self._gpus, ports, strict=True)) if ports is not None else {}
        self._servers: dict[str, ServerProcess] = {}
        self._reserved: dict[str, PortReservation] = {}
        self._closed = False

    @property
    def servers(self) -> dict[str, ServerProcess]:
        """Servers by name, including those that are starting or have exited."""
        return dict(self._servers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> list[ServerProcess]:
        """Start all servers and wait until they are ready; if one fails, all are ended.

        Raises:
            UsageError: a port in `ports` is in use, or a program cannot be run.
            EngineError: a server exited, or was not ready in time; quotes the end of its log.
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
        """Kill a server, and start it again on another port and the same GPUs."""
        await self._end(name, at_once=True)
        return await self._start(name, None)

    async def close(self) -> None:
        """End all servers and all processes that they started; idempotent."""
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
            raise EngineError(f"{name} cannot be started", got="a launcher that is closed")
        self._release(name)
        self._reserved[name] = reserve_port() if asked_port is None else reserve_exactly(asked_port)
        port = self._reserved[name].port
        gpus, log = self._gpus[name], self._logs / f"{name}.log"
        with pinned_thread(self._cores[name]):
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
