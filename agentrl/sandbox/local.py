"""Back end ``local``: Linux namespaces through bubblewrap, limits through control groups and resource limits.

The supervisor is the first process of the sandbox, and all other processes die with it. Processes in the sandbox read
and write its files, so that its paths are never resolved on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox.channel import SUPERVISOR_START_S
from agentrl.sandbox.control_groups import ControlGroup, find_hierarchy
from agentrl.sandbox.isolation import (
    HOME,
    PREFIX,
    PYTHON,
    account_files,
    arguments,
    filter_program,
    find_bubblewrap,
    is_free,
    new_user,
)
from agentrl.sandbox.spec import ANY_NETWORK, MIB, SandboxSpec
from agentrl.sandbox.supervised import BOOT, SupervisedSandbox, opening
from agentrl.sandbox.supervisor import kill_tree, process_parents, processes_below, send_signal

END_DEADLINE_S = 30.0
SUPERVISOR = (str(PYTHON), *BOOT)
UNCONFINED = "i-accept-that-commands-can-do-anything-that-i-can"
CONTROL = 0
"""File descriptor of the supervisor's socket: standard input."""


class Program:
    """Process of a supervisor.

    Args:
        control: Supervisor's end of the socket.
        bubblewrap: Bubblewrap with its options; empty for a supervisor without isolation.
        passed: Additional file descriptors that the supervisor inherits.
        variables: Environment variables of a supervisor without isolation.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self, control: int, bubblewrap: Sequence[str], *, passed: Sequence[int], variables: Mapping[str, str]
    ) -> None:
        self._errors = os.memfd_create("agentrl-errors")
        self._first = -1
        info, write_info = os.pipe()
        command = [*bubblewrap, *SUPERVISOR]
        if bubblewrap:
            command[1:1] = ["--info-fd", str(write_info)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=control,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[*passed, write_info],
                cwd="/",
                env=dict(variables),
            )
        except OSError:
            os.close(self._errors)
            os.close(info)
            raise
        finally:
            os.close(write_info)
        self._info, self._is_isolated = info, bool(bubblewrap)

    def open_handle(self) -> None:
        """Open a handle of the first process inside, whose PID bubblewrap reports; call after the first answer."""
        if self._is_isolated:
            text = os.read(self._info, 4096)
            pid = int(text.rpartition(b'"child-pid": ')[2].split(b",")[0].strip(b" \n}"))
            self._first = os.pidfd_open(pid)

    def read_errors(self) -> str:
        """Return the error output of the supervisor or of bubblewrap."""
        if self._errors < 0:
            return "it is closed"
        return os.pread(self._errors, 2000, 0).decode(errors="replace").strip() or "it ended without a message"

    def kill(self) -> None:
        """Kill the first process; the kernel then kills all others, including stopped ones. Idempotent."""
        if not self._is_isolated:
            if self._process.poll() is None:
                kill_tree(self._process.pid)
        elif self._first >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
                self._process.send_signal(signal.SIGCONT)  # a stopped bubblewrap does not exit when its child does
        elif self._process.poll() is None:
            self._kill_unfinished()

    def _kill_unfinished(self) -> None:
        """Kill bubblewrap and its child while the sandbox is being set up.

        The child waits for bubblewrap before it sets its parent-death signal, so it would wait forever. Bubblewrap is
        stopped first: a stopped process starts no children, and the PIDs of its children are not reused.
        """
        number = self._process.pid
        os.kill(number, signal.SIGSTOP)
        os.waitid(os.P_PID, number, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for child in processes_below({number}, process_parents()) - {number}:
            send_signal(child, signal.SIGKILL)
        self._process.kill()

    async def end(self) -> None:
        """Kill the sandbox and wait until it has ended.

        Raises:
            SandboxError: it is still running at the deadline.
        """
        self.kill()
        has_ended = await _has_ended(self._process, END_DEADLINE_S)
        for fd in (self._first, self._info, self._errors):
            if fd >= 0:
                os.close(fd)
        self._first = self._info = self._errors = -1
        if not has_ended:
            self._process.kill()
            raise SandboxError("a sandbox cannot be killed", got=f"process {self._process.pid} is still running")


def _memory_file(content: bytes, stack: contextlib.ExitStack) -> int:
    """Return a file descriptor from which `content` can be read."""
    fd = os.memfd_create("agentrl")
    stack.callback(os.close, fd)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def _has_ended(process: subprocess.Popen[bytes], deadline_s: float) -> bool:
    if process.poll() is not None:
        return True
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    handle = os.pidfd_open(process.pid)
    loop.add_reader(handle, ended.set)
    try:
        async with asyncio.timeout(deadline_s):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    process.wait()
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Options of local sandboxes."""

    readable: tuple[str, ...] = ()
    """Folders of the host that are readable inside, at the same paths."""
    writable: tuple[str, ...] = ()
    """Additional writable folders, initially empty."""
    folder: str = HOME
    """Working folder of commands."""
    unconfined: str = ""
    """Run without isolation, if set to `UNCONFINED`."""


class LocalSandbox(SupervisedSandbox):
    """Sandbox on this machine. The kernel kills it when the thread that started it ends.

    Raises:
        UsageError: the spec is not supported.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._options = _read_options(spec)
        self.folder = self._options.folder
        self._program: Program | None = None
        self._group: ControlGroup | None = None
        self._is_open = False  # True without isolation
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
        await self._channel.open(ours, opening(settings), deadline_s=SUPERVISOR_START_S)
        assert self._program is not None
        self._program.open_handle()
        await self._open_network()

    def _launch(self, control: socket.socket, stack: contextlib.ExitStack) -> dict[str, Any]:
        """Start the supervisor's process; return the supervisor's settings."""
        if self._options.unconfined:
            self._is_open, self.counts_processes = True, False
            self.folder = tempfile.mkdtemp(prefix="agentrl-unconfined-")
            self._program = Program(control.fileno(), [], passed=[], variables=self._variables())
            return {"user": 0, "groups": [], "folder": self.folder, "answers": CONTROL}
        bubblewrap, hierarchy = find_bubblewrap(), find_hierarchy()
        groups: list[int] = []
        if hierarchy is not None:
            self._group = ControlGroup(hierarchy, self.spec.limits)
            self.counts_memory = True
            groups = self._group.open()
            for fd in groups:
                stack.callback(os.close, fd)
        user = new_user()
        filters = _memory_file(filter_program(is_memory_counted=self._group is not None), stack)
        accounts = {path: _memory_file(content, stack) for path, content in account_files(user).items()}
        command = [bubblewrap, "--seccomp", str(filters)]
        for path, fd in accounts.items():
            command += ["--perms", "0444", "--ro-bind-data", str(fd), path]
        for name, value in self._variables().items():
            command += ["--setenv", name, value]
        folders = list(dict.fromkeys([*self._options.writable, self.folder]))
        command += arguments(
            user,
            self.spec.network,
            disk_bytes=self.spec.limits.disk_bytes or MIB,
            readable=self._options.readable,
            writable=[path for path in folders if path != HOME],
        )
        passed = [filters, *accounts.values(), *groups]
        self._program = Program(control.fileno(), command, passed=passed, variables={})
        owned = list(dict.fromkeys([HOME, *folders]))
        return {"user": user, "groups": groups, "folder": self.folder, "owned": owned, "answers": CONTROL}

    def _kill(self) -> None:
        if self._program is not None:
            self._program.kill()

    def _why_lost(self) -> str:
        return "it is closed" if self._program is None else self._program.read_errors()

    def _own_variables(self) -> dict[str, str]:
        return {"PATH": f"{PREFIX}/bin:/usr/local/bin:/usr/bin:/bin"}

    def _memory_kills(self) -> int:
        return 0 if self._group is None else self._group.memory_kills()

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._channel.hang_up()
        if self._program is not None:
            self._program.kill()  # before the first await, as `close` may be cancelled
        async with self._closing:
            await self._channel.close()
            await self._close_network()
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
    lists = {name: spec.options.get(name, ()) for name in ("readable", "writable")}
    for name, paths in lists.items():
        if not isinstance(paths, list | tuple) or not all(isinstance(path, str) for path in paths):
            raise UsageError(f"{name} folders of a sandbox are invalid", got=repr(paths), expected="a list")
    try:
        options = LocalOptions(**{**spec.options, **{name: tuple(paths) for name, paths in lists.items()}})
    except TypeError as error:
        expected = "readable, writable, folder, unconfined"
        raise UsageError("an option of local sandboxes is invalid", got=error, expected=expected) from error
    if not isinstance(options.folder, str):
        raise UsageError("the folder of a sandbox is invalid", got=repr(options.folder), expected="a path")
    _check_folders(options)
    if options.unconfined not in ("", UNCONFINED):
        raise UsageError(
            "a sandbox without isolation needs exactly this text", got=options.unconfined, expected=UNCONFINED
        )
    if options.unconfined and spec.network != ANY_NETWORK:
        raise UsageError(
            "a sandbox without isolation can use this machine's whole network",
            got=f"network {spec.network}",
            expected=f"network {ANY_NETWORK}",
            hint=f"set network: {ANY_NETWORK}, or remove options.unconfined",
        )
    return options


def _check_folders(options: LocalOptions) -> None:
    for path in options.readable:
        if not (path.startswith("/") and os.path.exists(path)):
            raise UsageError("a readable folder of a sandbox does not exist", got=path, expected="an absolute path")
    made = [*options.writable, *([] if options.folder == HOME else [options.folder])]
    for path in made:
        others = [*options.readable, *(other for other in made if other != path)]
        is_nested = any(Path(path).is_relative_to(other) or Path(other).is_relative_to(path) for other in others)
        if not is_free(path) or is_nested:
            raise UsageError(
                "a folder of a sandbox cannot be made writable",
                got=path,
                expected="an absolute path such as /app, outside system folders and the sandbox's other folders",
            )


async def _until(is_done: Callable[[], bool]) -> None:
    """Retry for a second; remaining groups are removed when the next process starts."""
    for _ in range(100):
        if is_done():
            return
        await asyncio.sleep(0.01)
