"""The back end ``local``: Linux namespaces through bubblewrap, limits through control groups and resource limits.

One process of ours, the supervisor, is the first inside; it starts commands as quickly as a fork, and everything dies
with it. Files are read and written from the inside too, so that no path of the sandbox is ever one of the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox.bubblewrap import PREFIX, USER_NAME, Walls, find_bubblewrap, new_user
from agentrl.sandbox.channel import Answer, Channel
from agentrl.sandbox.contract import NO_VARIABLES, Command, Entry, Sandbox, SandboxFileError, SandboxProcess
from agentrl.sandbox.control_groups import ControlGroup, find_hierarchy
from agentrl.sandbox.launch import Program, opening, walled
from agentrl.sandbox.limits import ExecResult, Limits
from agentrl.sandbox.local_process import LocalProcess
from agentrl.sandbox.seccomp import filter_program
from agentrl.sandbox.spec import ANY_NETWORK, NO_NETWORK, SandboxSpec

UNCONFINED = "i-accept-that-commands-can-do-anything-that-i-can"
START_DEADLINE_S = 60.0
GRACE_S = 30.0
"""How much later than its deadline a command's answer may come before the sandbox counts as broken."""
FILE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """The options of this back end."""

    readable: tuple[str, ...] = ()
    """Folders of the host that can be read inside, under the same names."""
    unconfined: str = ""
    """Run without any walls; only `UNCONFINED` does."""


class LocalSandbox(Sandbox):
    """A sandbox on this machine. It dies with the thread that started it, as the kernel has it.

    Args:
        spec: Its `options` are `LocalOptions`.

    Raises:
        UsageError: the spec asks for what this back end does not have.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._options = _read_options(spec)
        self._channel = Channel(self._why_lost)
        self._program: Program | None = None
        self._group: ControlGroup | None = None
        self._is_open = False  # without walls
        self._closing = asyncio.Lock()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as stack:
            try:
                settings = self._launch(theirs, stack)
            except OSError as error:
                ours.close()
                raise SandboxError("a sandbox does not start", got=error) from error
            except UsageError:
                ours.close()
                raise
        await self._channel.open(ours, opening(settings), deadline_s=START_DEADLINE_S)
        assert self._program is not None
        self._program.started()

    def _launch(self, control: socket.socket, stack: contextlib.ExitStack) -> dict[str, Any]:
        """Start the program; the settings that it is to be sent."""
        if self._options.unconfined:
            self._is_open, self.folder = True, tempfile.mkdtemp(prefix="agentrl-unconfined-")
            self._program = Program(control.fileno(), [], passed=[], variables=self._variables())
            return {"user": 0, "groups": [], "folder": self.folder}
        bubblewrap, hierarchy = find_bubblewrap(), find_hierarchy()
        groups: list[int] = []
        if hierarchy is not None:
            self._group = ControlGroup(hierarchy, self.spec.limits)
            groups = self._group.open()
            for fd in groups:
                stack.callback(os.close, fd)
        walls = Walls(
            user=new_user(),
            network=str(self.spec.network),
            limits=self.spec.limits,
            readable=self._options.readable,
        )
        filters = filter_program(is_memory_counted=self._group is not None)
        command, passed = walled(bubblewrap, walls, filters=filters, variables=self._variables(), stack=stack)
        self._program = Program(control.fileno(), command, passed=[*passed, *groups], variables={})
        return {"user": walls.user, "groups": groups, "folder": self.folder}

    def _why_lost(self) -> str:
        return "it is closed" if self._program is None else self._program.last_words()

    def _variables(self, more: Mapping[str, str] = NO_VARIABLES) -> dict[str, str]:
        return {
            "PATH": f"{PREFIX}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": self.folder,
            "USER": USER_NAME,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.spec.env,
            **more,
        }

    async def exec(
        self,
        command: Command,
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] = NO_VARIABLES,
        limits: Limits | None = None,
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        kills = self._memory_kills()
        allowed = self.spec.limits.narrowed(limits)
        answer = await self._start_job(self._executed(command, cwd, env, allowed, limits), stdin, allowed)
        return self._result(answer, kills)

    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] = NO_VARIABLES,
        limits: Limits | None = None,
    ) -> SandboxProcess:
        """See `Sandbox.spawn`."""
        kills = self._memory_kills()
        allowed = self.spec.limits.narrowed(limits)
        request = self._executed(command, cwd, env, allowed, limits)
        given = limits or Limits()
        request["seconds"] = given.seconds or float("inf")
        request["spawned"] = True
        if given.cpu_seconds is None:
            request["limits"] = [limit for limit in request["limits"] if limit[0] != resource.RLIMIT_CPU]
        number = self._channel.next_number()
        ended = asyncio.create_task(self._channel.ask("start", number=number, **request))
        await asyncio.sleep(0)  # the request is on its way
        return LocalProcess(self._channel, number, ended, lambda answer: self._result(answer, kills))

    def _executed(
        self, command: Command, cwd: str | None, env: Mapping[str, str], allowed: Limits, own: Limits | None
    ) -> dict[str, Any]:
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        variables = self._variables(env)
        names_are_good = all(name and "=" not in name for name in variables)
        if not argv or not names_are_good or any("\0" in word for word in (*argv, *variables, *variables.values())):
            raise UsageError(
                "a command is not understood", got=repr(argv)[:200], expected="words without NUL, NAME: value"
            )
        return {
            "action": "exec",
            "argv": argv,
            "env": variables,
            "cwd": cwd or self.folder,
            "seconds": allowed.seconds,
            "output": allowed.output_bytes,
            "spawned": False,
            "limits": self._resource_limits(allowed, own),
        }

    def _resource_limits(self, allowed: Limits, own: Limits | None) -> list[tuple[int, int]]:
        """Limits of each process, for ``setrlimit``; a group counts memory where there is one."""
        cpu, file = allowed.cpu_seconds, allowed.file_bytes
        assert cpu is not None
        assert file is not None
        found = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 1024), (resource.RLIMIT_FSIZE, file)]
        found.append((resource.RLIMIT_CPU, max(1, round(cpu))))
        memory = allowed.memory_bytes if self._group is None else (own or Limits()).memory_bytes
        if memory is not None:
            found.append((resource.RLIMIT_AS, memory))
        if allowed.processes is not None and not self._is_open:  # there it would count all of the user's
            found.append((resource.RLIMIT_NPROC, allowed.processes))
        return found

    async def _start_job(self, request: dict[str, Any], stdin: bytes, allowed: Limits) -> Answer:
        """Have it done; whoever stops waiting stops it."""
        number = self._channel.next_number()
        try:
            async with asyncio.timeout(request["seconds"] + GRACE_S):
                return await self._channel.ask("start", body=stdin, number=number, **request)
        except TimeoutError as late:
            raise SandboxError(
                "the sandbox does not answer", got=f"nothing in {request['seconds'] + GRACE_S} s"
            ) from late
        except asyncio.CancelledError:
            self._channel.tell("signal", target=number, signal=int(signal.SIGKILL))
            raise

    def _memory_kills(self) -> int:
        return 0 if self._group is None else self._group.memory_kills()

    def _result(self, answer: Answer, kills: int) -> ExecResult:
        return ExecResult(
            exit_code=answer.code,
            stdout=answer.out,
            stderr=answer.err,
            timed_out=answer.timed_out,
            truncated=answer.truncated,
            out_of_memory=self._memory_kills() > kills,
            seconds=answer.seconds,
        )

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
        if not path or "\0" in path:
            raise SandboxFileError("a path is not understood", got=repr(path))
        limits = [(resource.RLIMIT_FSIZE, self.spec.limits.file_bytes)]
        request = {"action": action, "path": path, "cwd": self.folder, "seconds": FILE_SECONDS, "spawned": False}
        request |= {"limits": limits, "output": max(output, 4096), **more}
        answer = await self._start_job(request, data, self.spec.limits)
        if answer.code != 0 or answer.timed_out:
            told = answer.err.decode(errors="replace").strip() or f"{path}: it took too long"
            raise SandboxFileError(f"cannot {action} {told}")
        return answer.out

    async def snapshot(self) -> bytes:
        """See `Sandbox.snapshot`."""
        most = 2 * (self.spec.limits.disk_bytes or 0)
        request = self._executed(["/bin/tar", "-cf", "-", "."], None, NO_VARIABLES, self.spec.limits, None)
        answer = await self._start_job({**request, "output": most}, b"", self.spec.limits)
        if answer.code != 0 or answer.truncated or answer.timed_out:
            raise SandboxFileError("no snapshot can be made", got=answer.err.decode(errors="replace").strip())
        return answer.out

    async def restore(self, snapshot: bytes) -> None:
        """See `Sandbox.restore`."""
        await self._channel.ask("kill_all")
        script = "find . -mindepth 1 -delete && exec /bin/tar -xpf -"
        request = self._executed(script, None, NO_VARIABLES, self.spec.limits, None)
        answer = await self._start_job(request, snapshot, self.spec.limits)
        if answer.code != 0 or answer.timed_out:
            raise SandboxFileError("a snapshot cannot be restored", got=answer.err.decode(errors="replace").strip())

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._channel.hang_up()
        if self._program is not None:
            self._program.kill()  # before anything is awaited: closing may be cancelled
        async with self._closing:
            await self._channel.close()
            if self._program is not None:
                await self._program.end()
                self._program = None
            if self._group is not None:
                await _until(self._group.remove)
                self._group = None
        if self._is_open:
            shutil.rmtree(self.folder, ignore_errors=True)


def _read_options(spec: SandboxSpec) -> LocalOptions:
    for name in ("image", "url"):
        if getattr(spec, name) is not None:
            raise UsageError(f"a local sandbox has no {name}", got=getattr(spec, name), hint="remove it")
    if spec.network not in (NO_NETWORK, ANY_NETWORK):
        raise UsageError(
            "a local sandbox cannot tell hosts apart",
            got=spec.network,
            expected=f"network {NO_NETWORK} or {ANY_NETWORK}",
            hint="use a docker sandbox",
        )
    readable = spec.options.get("readable", ())
    if isinstance(readable, str) or not all(isinstance(path, str) for path in readable):
        raise UsageError("readable folders of a sandbox are not understood", got=repr(readable), expected="a list")
    try:
        options = LocalOptions(**{**spec.options, "readable": tuple(readable)})
    except TypeError as error:
        raise UsageError(
            "an option of local sandboxes is not understood", got=error, expected="readable, unconfined"
        ) from error
    if options.unconfined not in ("", UNCONFINED):
        raise UsageError(
            "a sandbox without walls must be asked for in these words", got=options.unconfined, expected=UNCONFINED
        )
    for path in options.readable:
        if not (path.startswith("/") and os.path.exists(path)):
            raise UsageError("a readable folder of a sandbox is not there", got=path, expected="an absolute path")
    return options


async def _until(is_done: Callable[[], bool]) -> None:
    """Try for a second; what is left then is removed when the next one starts."""
    for _ in range(100):
        if is_done():
            return
        await asyncio.sleep(0.01)
