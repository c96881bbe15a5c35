"""The back end ``local``: Linux namespaces through bubblewrap, limits through control groups and resource limits.

One process of ours, the supervisor, is the first inside; it starts commands as quickly as a fork, and everything dies
with it. Files are read and written from the inside too, so that no path of the sandbox is ever one of the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.machinery
import importlib.util
import marshal
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox.bubblewrap import HOME, PREFIX, PYTHON, USER_NAME, Walls, account_files, arguments
from agentrl.sandbox.bubblewrap import find_bubblewrap, new_user
from agentrl.sandbox.channel import Answer, Channel
from agentrl.sandbox.contract import NO_VARIABLES, Command, Entry, Sandbox, SandboxFileError, SandboxProcess
from agentrl.sandbox.control_groups import ControlGroup, find_hierarchy
from agentrl.sandbox.limits import ExecResult, Limits
from agentrl.sandbox.local_process import LocalProcess
from agentrl.sandbox.seccomp import filter_program
from agentrl.sandbox.spec import ANY_NETWORK, NO_NETWORK, SandboxSpec

UNCONFINED = "i-accept-that-commands-can-do-anything-that-i-can"
START_DEADLINE_S = 60.0
END_DEADLINE_S = 30.0
GRACE_S = 30.0
"""How much later than its deadline a command's answer may come before the sandbox counts as broken."""
FILE_SECONDS = 60.0
_BOOT = """
import marshal, os
def read(size):
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or os._exit(0)
    return data
exec(marshal.loads(read(int.from_bytes(read(4), "little"))), {"__name__": "__main__"})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """The options of this back end."""

    readable: tuple[str, ...] = ()
    """Folders of the host that can be read inside, under the same names."""
    unconfined: str = ""
    """Run without any walls; only `UNCONFINED` does."""


class LocalSandbox(Sandbox):
    """A sandbox on this machine.

    Args:
        spec: Its `options` are `LocalOptions`.

    Raises:
        UsageError: the spec asks for what this back end does not have.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._options = _read_options(spec)
        self._channel = Channel(self._last_words)
        self._program: subprocess.Popen[bytes] | None = None
        self._words: Any = None
        self._first = -1
        self._group: ControlGroup | None = None
        self._unwalled: str | None = None

    async def _start(self) -> None:
        user = 0 if self._options.unconfined else new_user()
        hierarchy = None if self._options.unconfined else find_hierarchy()
        bubblewrap = None if self._options.unconfined else find_bubblewrap()
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as stack:
            groups: list[int] = []
            try:
                if hierarchy is not None:
                    self._group = ControlGroup(hierarchy, self.spec.limits)
                    groups = [_until_left(stack, fd) for fd in self._group.open()]
                command, passed = self._walled(bubblewrap, user, stack)
                told, tell = os.pipe() if bubblewrap else (-1, -1)
                if bubblewrap:
                    _until_left(stack, tell)
                    command[1:1] = ["--info-fd", str(tell)]
                    passed = [*passed, tell]
                self._words = tempfile.TemporaryFile()
                self._program = subprocess.Popen(
                    command,
                    stdin=theirs,
                    stdout=subprocess.DEVNULL,
                    stderr=self._words,
                    pass_fds=[*passed, *groups],
                    cwd="/",
                    env={} if bubblewrap else self._variables(NO_VARIABLES),
                )
            except OSError as error:
                ours.close()
                raise SandboxError("a sandbox does not start", got=error) from error
        settings = {"user": user, "groups": groups, "folder": self.folder}
        await self._channel.open(ours, _opening(settings), deadline_s=START_DEADLINE_S)
        if told >= 0:
            self._first = _open_first(told)

    def _walled(self, bubblewrap: str | None, user: int, stack: contextlib.ExitStack) -> tuple[list[str], list[int]]:
        """The command that starts the supervisor, and the file descriptors that it needs."""
        boot = [str(PYTHON), "-I", "-S", "-B", "-c", _BOOT]
        if bubblewrap is None:
            self._unwalled = self.folder = tempfile.mkdtemp(prefix="agentrl-unconfined-")
            return boot, []
        walls = Walls(
            user=user, network=str(self.spec.network), limits=self.spec.limits, readable=self._options.readable
        )
        filters = _until_left(stack, _memory_file(filter_program(is_memory_counted=self._group is not None)))
        words, passed = ["--seccomp", str(filters)], [filters]
        for path, content in account_files(user).items():
            passed.append(_until_left(stack, _memory_file(content)))
            words += ["--perms", "0444", "--ro-bind-data", str(passed[-1]), path]
        for name, value in self._variables(NO_VARIABLES).items():
            words += ["--setenv", name, value]
        return [bubblewrap, *words, *arguments(walls), *boot], passed

    def _variables(self, more: Mapping[str, str]) -> dict[str, str]:
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
        if not argv or any("\0" in word for word in argv):
            raise UsageError("a command is not understood", got=repr(argv)[:200], expected="words without NUL")
        return {
            "action": "exec",
            "argv": argv,
            "env": self._variables(env),
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
        if allowed.processes is not None and self._unwalled is None:  # there it would count all of the user's
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
        await self._channel.close()
        program, self._program = self._program, None
        if program is not None:
            await self._end(program)
        if self._group is not None:
            await _until(self._group.remove)
            self._group = None
        if self._words is not None:
            self._words.close()
            self._words = None
        if self._unwalled is not None:
            shutil.rmtree(self._unwalled, ignore_errors=True)

    async def _end(self, program: subprocess.Popen[bytes]) -> None:
        """Kill the first process, with which the kernel kills all others, and wait for bubblewrap to say so."""
        if self._first >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            os.close(self._first)
            self._first = -1
        elif self._unwalled is None:
            program.kill()
        if not await _has_ended(program, END_DEADLINE_S):
            program.kill()
            raise SandboxError("a sandbox cannot be killed", got=f"process {program.pid} goes on")

    def _last_words(self) -> str:
        """What the supervisor, or bubblewrap, complained about."""
        if self._words is None:
            return "it is closed"
        self._words.seek(0)
        return self._words.read(2000).decode(errors="replace").strip() or "it ended without a word"


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
    try:
        options = LocalOptions(**{**spec.options, "readable": tuple(spec.options.get("readable", ()))})
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


def _opening(settings: dict[str, Any]) -> bytes:
    """What the supervisor reads first: its code, and its settings."""
    found = importlib.util.find_spec("agentrl.sandbox.supervisor")
    assert found is not None
    assert isinstance(found.loader, importlib.machinery.SourceFileLoader)
    parts = (marshal.dumps(found.loader.get_code(found.name)), marshal.dumps(settings))
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _memory_file(content: bytes) -> int:
    """A file descriptor from which `content` can be read."""
    fd = os.memfd_create("agentrl")
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _until_left(stack: contextlib.ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _open_first(told: int) -> int:
    """A handle of the sandbox's first process, of which bubblewrap tells."""
    with open(told, "rb") as file:
        text = file.read()
    pid = int(text.rpartition(b'"child-pid": ')[2].split(b",")[0].strip(b" \n}"))
    return os.pidfd_open(pid)


async def _has_ended(program: subprocess.Popen[bytes], deadline_s: float) -> bool:
    if program.poll() is not None:
        return True
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    handle = os.pidfd_open(program.pid)
    loop.add_reader(handle, ended.set)
    try:
        async with asyncio.timeout(deadline_s):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    program.wait()
    return True


async def _until(is_done: Callable[[], bool]) -> None:
    """Try for a second; what is left then is removed when the next one starts."""
    for _ in range(100):
        if is_done():
            return
        await asyncio.sleep(0.01)
