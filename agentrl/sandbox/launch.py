"""The program of a local sandbox, seen from outside: started, listened to, killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from agentrl.errors import SandboxError
from agentrl.sandbox.bubblewrap import PYTHON, Walls, account_files, arguments
from agentrl.sandbox.opening import BOOT

END_DEADLINE_S = 30.0
SUPERVISOR = (str(PYTHON), *BOOT)


class Program:
    """A supervisor, behind walls or without.

    Args:
        control: The supervisor's end of the socket.
        bubblewrap: What makes the walls, with its options; without, nothing does.
        passed: File descriptors that it gets, besides.
        variables: Environment variables of the supervisor without walls.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, control: int, bubblewrap: Sequence[str], *, passed: Sequence[int], variables: Mapping[str, str]
    ) -> None:
        self._words = os.memfd_create("agentrl-words")
        self._first = -1
        told, tell = os.pipe()
        command = [*bubblewrap, *SUPERVISOR]
        if bubblewrap:
            command[1:1] = ["--info-fd", str(tell)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=control,
                stdout=subprocess.DEVNULL,
                stderr=self._words,
                pass_fds=[*passed, tell],
                cwd="/",
                env=dict(variables),
            )
        except OSError:
            os.close(self._words)
            os.close(told)
            raise
        finally:
            os.close(tell)
        self._told, self._has_walls = told, bool(bubblewrap)

    def started(self) -> None:
        """Get a handle of the first process inside, of which bubblewrap has told; to be called when that answers."""
        if self._has_walls:
            text = os.read(self._told, 4096)
            pid = int(text.rpartition(b'"child-pid": ')[2].split(b",")[0].strip(b" \n}"))
            self._first = os.pidfd_open(pid)

    def last_words(self) -> str:
        """What the supervisor, or bubblewrap, complained about."""
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

        That child waits for bubblewrap's word before it asks to die with it: it would wait for ever. A stopped process
        starts no other, and while it lives the numbers of its children are theirs.
        """
        number = self._process.pid
        os.kill(number, signal.SIGSTOP)
        os.waitid(os.P_PID, number, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for child in _children(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._process.kill()

    async def end(self) -> None:
        """Kill it, and wait until nothing of it is left. Without walls the supervisor ends by itself, at the hang-up.

        Raises:
            SandboxError: it goes on.
        """
        self.kill()
        has_ended = await _has_ended(self._process, END_DEADLINE_S)
        for fd in (self._first, self._told, self._words):
            if fd >= 0:
                os.close(fd)
        self._first = self._told = self._words = -1
        if not has_ended:
            self._process.kill()
            raise SandboxError("a sandbox cannot be killed", got=f"process {self._process.pid} goes on")


def walled(
    bubblewrap: str, walls: Walls, *, filters: bytes, variables: Mapping[str, str], stack: contextlib.ExitStack
) -> tuple[list[str], list[int]]:
    """Bubblewrap with its options, and the file descriptors from which it reads; they stay open as long as `stack`."""
    passed = [_memory_file(filters, stack)]
    words = ["--seccomp", str(passed[0])]
    for path, content in account_files(walls.user).items():
        passed.append(_memory_file(content, stack))
        words += ["--perms", "0444", "--ro-bind-data", str(passed[-1]), path]
    for name, value in variables.items():
        words += ["--setenv", name, value]
    return [bubblewrap, *words, *arguments(walls)], passed


def _memory_file(content: bytes, stack: contextlib.ExitStack) -> int:
    """A file descriptor from which `content` can be read."""
    fd = os.memfd_create("agentrl")
    stack.callback(os.close, fd)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _children(number: int) -> list[int]:
    """The processes whose parent is `number`."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"{entry.path}/stat", encoding="utf-8", errors="replace") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == number:
                    found.append(int(entry.name))
    return found


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
