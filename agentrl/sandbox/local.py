"""The back end ``local``: Linux namespaces through bubblewrap, limits through control groups and resource limits.

The supervisor is the first process inside, and everything dies with it. Files are read and written inside too, so that
no path of the sandbox is ever one of the host.
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
from agentrl.sandbox.supervisor import process_parents, processes_below, send_signal

END_DEADLINE_S = 30.0
SUPERVISOR = (str(PYTHON), *BOOT)


class Program:
    """Process of a supervisor.

    Args:
        control: The supervisor's end of the socket.
        bubblewrap: Bubblewrap with its options; empty for a supervisor without isolation.
        passed: Further file descriptors that it inherits.
        variables: Environment variables of a supervisor without isolation.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, control: int, bubblewrap: Sequence[str], *, passed: Sequence[int], variables: Mapping[str, str]
    ) -> None:
        self._words = os.memfd_create("agentrl-words")
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
                stderr=self._words,
                pass_fds=[*passed, write_info],
                cwd="/",
                env=dict(variables),
            )
        except OSError:
            os.close(self._words)
            os.close(info)
            raise
        finally:
            os.close(write_info)
        self._info, self._has_walls = info, bool(bubblewrap)

    def started(self) -> None:
        """Get a handle of the first process inside, whose number bubblewrap writes; call it once that answers."""
        if self._has_walls:
            text = os.read(self._info, 4096)
            pid = int(text.rpartition(b'"child-pid": ')[2].split(b",")[0].strip(b" \n}"))
            self._first = os.pidfd_open(pid)

    def last_words(self) -> str:
        """Return what the supervisor, or bubblewrap, complained about."""
        if self._words < 0:
            return "it is closed"
        return os.pread(self._words, 2000, 0).decode(errors="replace").strip() or "it ended without a word"

    def kill(self) -> None:
        """Kill the first process, with which the kernel kills all others. Idempotent."""
        if self._first >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        elif self._has_walls and self._process.poll() is None:
            self._kill_unfinished()

    def _kill_unfinished(self) -> None:
        """Kill bubblewrap while it makes the walls, together with its child.

        That child waits for bubblewrap before it asks to die with it, so it would wait for ever. A stopped process
        starts no other, and while it lives its children's numbers are not used again.
        """
        number = self._process.pid
        os.kill(number, signal.SIGSTOP)
        os.waitid(os.P_PID, number, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for child in processes_below({number}, process_parents()) - {number}:
            send_signal(child, signal.SIGKILL)
        self._process.kill()

    async def end(self) -> None:
        """Kill it, and wait until nothing of it is left. Without walls the supervisor ends by itself, at the hang-up.

        Raises:
            SandboxError: it goes on.
        """
        self.kill()
        has_ended = await _has_ended(self._process, END_DEADLINE_S)
        for fd in (self._first, self._info, self._words):
            if fd >= 0:
                os.close(fd)
        self._first = self._info = self._words = -1
        if not has_ended:
            self._process.kill()
            raise SandboxError("a sandbox cannot be killed", got=f"process {self._process.pid} goes on")


def _memory_file(content: bytes, stack: contextlib.ExitStack) -> int:
    """A file descriptor from which `content` can be read."""
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


UNCONFINED = "i-accept-that-commands-can-do-anything-that-i-can"
START_DEADLINE_S = 60.0
CONTROL = 0
"""The supervisor's file descriptor of the socket: its standard input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """The options of this back end."""

    readable: tuple[str, ...] = ()
    """Folders of the host that can be read inside, under the same names."""
    writable: tuple[str, ...] = ()
    """Further folders that can be written, empty at the start."""
    folder: str = HOME
    """Where commands start."""
    unconfined: str = ""
    """Run without any walls; only `UNCONFINED` does."""


class LocalSandbox(SupervisedSandbox):
    """A sandbox on this machine. It dies with the thread that started it, as the kernel has it.

    Args:
        spec: Its `options` are `LocalOptions`.

    Raises:
        UsageError: the spec asks for what this back end does not have.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._options = _read_options(spec)
        self.folder = self._options.folder
        self._program: Program | None = None
        self._group: ControlGroup | None = None
        self._is_open = False  # without walls, where processes of this process's own user would be counted
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
        await self._open_network()

    def _launch(self, control: socket.socket, stack: contextlib.ExitStack) -> dict[str, Any]:
        """Start the program; return the settings that it is to be sent."""
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

    def _why_lost(self) -> str:
        return "it is closed" if self._program is None else self._program.last_words()

    def _own_variables(self) -> dict[str, str]:
        return {"PATH": f"{PREFIX}/bin:/usr/local/bin:/usr/bin:/bin"}

    def _memory_kills(self) -> int:
        return 0 if self._group is None else self._group.memory_kills()

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._channel.hang_up()
        if self._program is not None:
            self._program.kill()  # before anything is awaited: closing may be cancelled
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
            raise UsageError(f"{name} folders of a sandbox are not understood", got=repr(paths), expected="a list")
    try:
        options = LocalOptions(**{**spec.options, **{name: tuple(paths) for name, paths in lists.items()}})
    except TypeError as error:
        expected = "readable, writable, folder, unconfined"
        raise UsageError("an option of local sandboxes is not understood", got=error, expected=expected) from error
    if not isinstance(options.folder, str):
        raise UsageError("the folder of a sandbox is not understood", got=repr(options.folder), expected="a path")
    _check_folders(options)
    if options.unconfined not in ("", UNCONFINED):
        raise UsageError(
            "a sandbox without walls must be asked for in these words", got=options.unconfined, expected=UNCONFINED
        )
    if options.unconfined and spec.network != ANY_NETWORK:
        raise UsageError(
            "a sandbox without walls has all of this machine's network",
            got=f"network {spec.network}",
            expected=f"network {ANY_NETWORK}",
            hint=f"say so (network: {ANY_NETWORK}), or remove options.unconfined",
        )
    return options


def _check_folders(options: LocalOptions) -> None:
    for path in options.readable:
        if not (path.startswith("/") and os.path.exists(path)):
            raise UsageError("a readable folder of a sandbox is not there", got=path, expected="an absolute path")
    made = [*options.writable, *([] if options.folder == HOME else [options.folder])]
    for path in made:
        others = [*options.readable, *(other for other in made if other != path)]
        is_nested = any(Path(path).is_relative_to(other) or Path(other).is_relative_to(path) for other in others)
        if not is_free(path) or is_nested:
            raise UsageError(
                "a folder of a sandbox cannot be made writable",
                got=path,
                expected="an absolute path such as /app: outside the system's folders, and not inside another of these",
            )


async def _until(is_done: Callable[[], bool]) -> None:
    """Try for a second; what is left then is removed when the next one starts."""
    for _ in range(100):
        if is_done():
            return
        await asyncio.sleep(0.01)
