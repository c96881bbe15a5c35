"""Base class of sandboxes that run a supervisor: commands, files, snapshots, running programs.

The supervisor is sent into a sandbox as a short bootstrap on Python's command line, followed by its code on the socket.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.machinery
import importlib.util
import marshal
import os
import resource
import signal
import struct
from abc import abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Unpack

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox import supervisor, supervisor_files, supervisor_ports
from agentrl.sandbox.allow_list import LOOPBACK, AllowList
from agentrl.sandbox.channel import SUPERVISOR_ANSWER_S, Channel, Ports
from agentrl.sandbox.contract import (
    NO_VARIABLES,
    Command,
    CommandOptions,
    Entry,
    ProtocolFactory,
    Sandbox,
    SandboxFileError,
    SandboxProcess,
)
from agentrl.sandbox.isolation import USER_NAME
from agentrl.sandbox.proxy import HostProxy, variables
from agentrl.sandbox.spec import ExecResult, Limits, SandboxSpec

OLDEST_PYTHON = (3, 10)
TOO_OLD = "this Python is too old"
PACKAGE = "agentrl.sandbox"
"""Name of the package with the supervisor's modules, on the host and in the sandbox."""
_BOOT = f"""
import sys, os
if sys.version_info < {OLDEST_PYTHON}:
    os.write(2, b"{TOO_OLD}: " + sys.version.split()[0].encode())
    os._exit(1)
import marshal, _frozen_importlib_external
def read(size):
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or os._exit(0)
    return data
def read_part():
    return marshal.loads(read(int.from_bytes(read(4), "little")))
magic, modules = read_part()
same = magic == _frozen_importlib_external.MAGIC_NUMBER
package = sys.modules["{PACKAGE}"] = type(sys)("{PACKAGE}")
for name, code, source in modules:
    made = type(sys)(name)
    setattr(package, name, made)
    exec(marshal.loads(code) if same else compile(source, name, "exec"), made.__dict__)
made.main(read_part())
"""
BOOT = ("-I", "-S", "-B", "-c", _BOOT)
"""Arguments of the sandbox's Python, which then reads an `opening`."""
COMMAND_GRACE_S = 15.0
"""Seconds after a command's deadline at which the sandbox counts as broken and is killed by the host."""
FILE_SECONDS = 60.0


def opening(settings: dict[str, Any]) -> bytes:
    """Build the supervisor's first input: its code and its settings."""
    return b"".join(struct.pack("<I", len(part)) + part for part in (_supervisor_code(), marshal.dumps(settings)))


@functools.cache
def _supervisor_code() -> bytes:
    """Return the supervisor's compiled code, for this version of Python, with its source for other versions."""
    modules = [_code_of(module) for module in (supervisor_files, supervisor_ports, supervisor)]
    return marshal.dumps((importlib.util.MAGIC_NUMBER, modules))


def _code_of(module: ModuleType) -> tuple[str, bytes, str | None]:
    name, loader = module.__name__, module.__loader__
    assert isinstance(loader, importlib.machinery.SourceFileLoader)
    return name.rpartition(".")[2], marshal.dumps(loader.get_code(name)), loader.get_source(name)


class PollingProcess(SandboxProcess):
    """Process whose output is requested in parts. A part requested by a cancelled reader is kept."""

    def __init__(self) -> None:
        self._pull: asyncio.Task[bytes] | None = None
        self._pulled = bytearray()

    @abstractmethod
    async def _next_piece(self) -> bytes:
        """Request the next part of the output; empty at the end.

        Raises:
            SandboxError: the sandbox is gone.
        """

    async def read(self) -> bytes:
        """See `SandboxProcess.read`."""
        if not self._pulled:
            await self._more()
        piece = bytes(self._pulled)
        self._pulled.clear()
        return piece

    async def read_line(self, *, longest: int = 2**20) -> bytes:
        """See `SandboxProcess.read_line`."""
        searched = 0
        while True:
            end = self._pulled.find(b"\n", searched, longest)
            if end >= 0 or len(self._pulled) >= longest:
                break
            searched = len(self._pulled)
            if not await self._more():
                break
        size = end + 1 if end >= 0 else min(len(self._pulled), longest)
        line = bytes(self._pulled[:size])
        del self._pulled[:size]
        return line

    async def _more(self) -> bool:
        """Request the next part; returns False at the end of the output."""
        if self._pull is None:
            self._pull = asyncio.create_task(self._next_piece())
            self._pull.add_done_callback(ignore_error)
        pull = self._pull
        try:
            piece = await asyncio.shield(pull)
        finally:
            if pull.done():
                self._pull = None
        self._pulled += piece
        return bool(piece)


def ignore_error(task: asyncio.Task[object]) -> None:
    """Mark a task's error as retrieved, so that it is not logged if the task is never awaited."""
    if not task.cancelled():
        task.exception()


class StreamingProcess(PollingProcess):
    """Process under a supervisor."""

    def __init__(self, channel: Channel, number: int, ended: asyncio.Task[ExecResult]) -> None:
        super().__init__()
        self._channel, self._number, self._ended = channel, number, ended
        self._ended.add_done_callback(ignore_error)

    async def write(self, data: bytes) -> None:
        """See `SandboxProcess.write`."""
        answer = await self._channel.ask("push", body=data, target=self._number)
        if answer.exit_code != 0:
            raise BrokenPipeError(answer.exit_code, "the program in the sandbox has closed its input")

    async def _next_piece(self) -> bytes:
        return (await self._channel.ask("pull", target=self._number)).stdout

    async def wait(self) -> ExecResult:
        """See `SandboxProcess.wait`."""
        return await asyncio.shield(self._ended)

    async def interrupt(self) -> None:
        """See `SandboxProcess.interrupt`."""
        await self._signal(signal.SIGINT)

    async def kill(self) -> None:
        """See `SandboxProcess.kill`."""
        await self._signal(signal.SIGKILL)
        try:
            async with asyncio.timeout(SUPERVISOR_ANSWER_S):
                await self.wait()
        except TimeoutError as late:
            waited = f"it has not ended in {SUPERVISOR_ANSWER_S:g} s"
            raise SandboxError("a program in a sandbox cannot be killed", got=waited) from late
        self._channel.notify("release", target=self._number)

    async def _signal(self, number: signal.Signals) -> None:
        await self._channel.ask("signal", deadline_s=SUPERVISOR_ANSWER_S, target=self._number, signal=int(number))


class SupervisedSandbox(Sandbox):
    """Sandbox in which a supervisor (`agentrl.sandbox.supervisor`) serves the requests."""

    counts_memory = False
    """True if a control group counts the memory of all commands together."""
    counts_processes = True
    """True if the commands have their own user, so that a limit per user counts their processes."""

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._channel = Channel(self._why_lost)
        self._ports = Ports(self._channel)
        self._allowed = AllowList.read(spec.hosts)
        self._proxy = HostProxy(self._allowed) if spec.hosts else None
        self._proxy_variables: Mapping[str, str] = {}

    async def forward(self, protocol: ProtocolFactory, *, port: int = 0) -> int:
        """See `Sandbox.forward`."""
        return await self._ports.open(protocol, port)

    async def _open_network(self) -> None:
        """Open the proxy to the hosts of an allow-list; called when the supervisor is ready.

        Listed ports of this machine's 127.0.0.1 are forwarded from the same ports in the sandbox, because clients use
        no proxy for that address.
        """
        if self._proxy is not None:
            self._proxy_variables = variables(await self.forward(self._proxy.protocol))
            for port in self._allowed.own_ports:
                await self.forward(self._proxy.protocol_to(LOOPBACK, port), port=port)

    async def _close_network(self) -> None:
        await self._ports.close()
        if self._proxy is not None:
            await self._proxy.close()

    @abstractmethod
    def _why_lost(self) -> str:
        """Return the reason why the supervisor ended."""

    @abstractmethod
    def _own_variables(self) -> dict[str, str]:
        """Return the environment variables of this back end, such as ``PATH``."""

    def _variables(self, more: Mapping[str, str] = NO_VARIABLES) -> dict[str, str]:
        return {
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self._own_variables(),
            **self._proxy_variables,
            "HOME": self.folder,
            "USER": USER_NAME,
            **self.spec.env,
            **more,
        }

    def _kill(self) -> None:
        """Kill a sandbox whose supervisor does not answer, if the back end can do so from the host; return at once."""

    def _memory_kills(self) -> int:
        """Return the number of processes killed at the memory limit, if the supervisor does not report it."""
        return 0

    async def exec(self, command: Command, *, stdin: bytes = b"", **options: Unpack[CommandOptions]) -> ExecResult:
        """See `Sandbox.exec`."""
        return await self._start_job(self._exec_request(command, **options), stdin)

    async def spawn(self, command: Command, **options: Unpack[CommandOptions]) -> SandboxProcess:
        """See `Sandbox.spawn`."""
        request = self._exec_request(command, **options)
        given = options.get("limits") or Limits()
        request |= {"seconds": given.seconds or float("inf"), "spawned": True}
        if given.cpu_seconds is None:
            request["limits"] = [limit for limit in request["limits"] if limit[0] != resource.RLIMIT_CPU]
        number = self._channel.next_number()
        ended = asyncio.create_task(self._ask_start(number, request))
        await asyncio.sleep(0)  # lets the task send the request
        return StreamingProcess(self._channel, number, ended)

    def _exec_request(self, command: Command, **options: Unpack[CommandOptions]) -> dict[str, Any]:
        own = options.get("limits")
        allowed = self.spec.limits.narrow(own)
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        variables = self._variables(options.get("env", NO_VARIABLES))
        names_are_good = all(name and "=" not in name for name in variables)
        if not argv or not names_are_good or any("\0" in word for word in (*variables, *variables.values())):
            raise UsageError(
                "a command is invalid", got=repr(argv)[:200], expected="a program, and variables without NUL"
            )
        return {
            "action": "exec",
            "argv": argv,
            "env": variables,
            "cwd": options.get("cwd") or self.folder,
            "seconds": allowed.seconds,
            "output": allowed.output_bytes,
            "spawned": False,
            "limits": self._resource_limits(allowed, own),
        }

    def _resource_limits(self, allowed: Limits, own: Limits | None) -> list[tuple[int, int]]:
        """Return the limits of each process, for ``setrlimit``. A control group replaces the sandbox's memory limit."""
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: 1024,
            resource.RLIMIT_FSIZE: allowed.file_bytes,
            resource.RLIMIT_CPU: max(1, round(allowed.cpu_seconds or 0)),
            resource.RLIMIT_AS: (own or Limits()).memory_bytes if self.counts_memory else allowed.memory_bytes,
            resource.RLIMIT_NPROC: allowed.processes if self.counts_processes else None,
        }
        return [(kind, most) for kind, most in limits.items() if most is not None]

    async def _start_job(self, request: dict[str, Any], stdin: bytes) -> ExecResult:
        """Run a command until it ends; it is killed if this call is cancelled."""
        number, deadline_s = self._channel.next_number(), request["seconds"] + COMMAND_GRACE_S
        try:
            async with asyncio.timeout(deadline_s):
                return await self._ask_start(number, request, stdin)
        except TimeoutError as late:
            self._kill()
            raise SandboxError(
                "the sandbox does not answer and was killed", got=f"no answer in {deadline_s:g} s"
            ) from late
        except asyncio.CancelledError:
            self._channel.notify("signal", target=number, signal=int(signal.SIGKILL))
            raise

    async def _ask_start(self, number: int, request: dict[str, Any], stdin: bytes = b"") -> ExecResult:
        kills = self._memory_kills()
        result = await self._channel.ask("start", body=stdin, number=number, **request)
        return dataclasses.replace(result, out_of_memory=result.out_of_memory or self._memory_kills() > kills)

    async def read(self, path: str, *, most: int = 16 * 2**20) -> bytes:
        """See `Sandbox.read`."""
        return await self._on_file("read", path, output=most + 1, most=most)

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """See `Sandbox.write`."""
        await self._on_file("write", path, data, executable=executable)

    async def list(self, path: str = ".") -> list[Entry]:
        """See `Sandbox.list`."""
        found = await self._on_file("list", path, output=16 * 2**20)
        entries = [Entry(name=os.fsdecode(line[1:]), is_folder=line[:1] == b"d") for line in found.split(b"\0") if line]
        return sorted(entries, key=lambda entry: entry.name)

    async def _on_file(self, action: str, path: str, data: bytes = b"", *, output: int = 0, **more: Any) -> bytes:
        if not path or "\0" in path or not _can_be_sent(path):
            raise SandboxFileError("a path is invalid", got=ascii(path))
        limits = [(resource.RLIMIT_FSIZE, self.spec.limits.file_bytes)]
        request = {"action": action, "path": path, "cwd": self.folder, "seconds": FILE_SECONDS, "spawned": False}
        request |= {"limits": limits, "output": max(output, 4096), **more}
        result = await self._start_job(request, data)
        if not result.is_success:
            complaint = result.stderr.decode(errors="replace").strip() or f"{path}: it took too long"
            raise SandboxFileError(f"cannot {action} {complaint}")
        return result.stdout

    async def snapshot(self) -> bytes:
        """See `Sandbox.snapshot`."""
        most = 2 * (self.spec.limits.disk_bytes or 0)
        request = self._exec_request(["/bin/tar", "-cf", "-", "."])
        result = await self._start_job({**request, "output": most}, b"")
        if not result.is_success or result.truncated:
            raise SandboxFileError("a snapshot cannot be made", got=result.stderr.decode(errors="replace").strip())
        return result.stdout

    async def restore(self, snapshot: bytes) -> None:
        """See `Sandbox.restore`."""
        await self._channel.ask("kill_all", deadline_s=SUPERVISOR_ANSWER_S)
        script = "find . -mindepth 1 -delete && exec /bin/tar -xpf -"
        result = await self._start_job(self._exec_request(script), snapshot)
        if not result.is_success:
            raise SandboxFileError("a snapshot cannot be restored", got=result.stderr.decode(errors="replace").strip())


def _can_be_sent(path: str) -> bool:
    """Return True if a path can be encoded: undecodable file names are escaped, other lone surrogates are invalid."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True
