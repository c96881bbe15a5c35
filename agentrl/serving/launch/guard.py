"""Guard of an inference server: starts the server, and ends all processes that it started.

Run by file name, using the standard library only. The guard ends the server's process tree when its standard input
closes, when its parent process exits for any reason, or when the server's first process exits. It has its own session,
so signals to the process groups of the trainer and the server do not reach it. It is the subreaper of its descendants,
so processes that leave the server's session are still found. Linux only.

    python guard.py PARENT_PID GRACE_S COMMAND [ARGUMENT]...

Standard output is one line: ``started PID`` or ``failed REASON``. The server's output goes to standard error. On
standard input, ``e`` ends the server and ``k`` kills it. The exit code is the server's; 128 + N after signal N.

Killed processes leave their shared memory segments behind. The guard regularly records the segments that the server's
processes have mapped. At the end it removes those that no process uses and that did not exist before the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from enum import Enum, auto
from types import FrameType

SET_PARENT_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER = 36
"""Numbers of prctl(2)."""

STANDARD_INPUT = 0
GUARD_POLL_S = 0.02
LEFT_S = 1.0
"""Seconds for the other processes to exit after the first one."""
GUARD_KILL_S = 10.0
"""Seconds to wait for killed processes; a process that hangs in the kernel is ignored after that."""
NOT_STARTED = 127
SHARED_MEMORY = "/dev/shm"
LOOK_S = 10.0
"""Seconds between two records of the segments. One more is taken before the end, unless all processes die at once."""

_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Cause(Enum):
    """Reason to end a server."""

    ENDED = auto()
    """The server's first process exited."""
    END_REQUESTED = auto()
    KILL_REQUESTED = auto()
    """The server must be killed."""
    ORPHANED = auto()
    """Standard input closed without an instruction, or the parent process exited."""


INSTRUCTIONS = {b"e": Cause.END_REQUESTED, b"k": Cause.KILL_REQUESTED}


class Guard:
    """Guard of one server.

    Args:
        server: PID of the server's first process, which leads a session.
        parent: Process descriptor of the guard's parent.
        foreign: Segments that existed before the server, from `list_segments`.
    """

    def __init__(self, server: int, parent: int, foreign: dict[str, int]) -> None:
        self.server = server
        self.parent = parent
        self.code: int | None = None
        self._foreign = foreign
        self._segments: dict[str, int] = {}

    def watch(self, wakeup: int) -> Cause:
        """Wait until the server has to be ended, and return the reason."""
        with selectors.DefaultSelector() as selector:
            for descriptor in (STANDARD_INPUT, self.parent, wakeup):
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                self.reap()
                if self.code is not None:
                    return Cause.ENDED
                ready = {key.fd for key, _ in selector.select(LOOK_S)}
                self.record_segments()
                if wakeup in ready and set(os.read(wakeup, 512)) - {signal.SIGCHLD}:
                    return Cause.END_REQUESTED
                if STANDARD_INPUT in ready:
                    return INSTRUCTIONS.get(os.read(STANDARD_INPUT, 1), Cause.ORPHANED)
                if self.parent in ready:
                    return Cause.ORPHANED

    def end(self, grace_s: float) -> None:
        """Terminate the first process, and kill all that remain after `grace_s`; with 0, kill all at once."""
        self.record_segments()
        if self.code is None and grace_s > 0:
            send(signal.SIGTERM, [self.server])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.server, signal.SIGCONT)  # a stopped process does not handle SIGTERM
            self._wait(lambda: self.code is not None, grace_s)
        if grace_s > 0:  # remaining processes may have to release shared memory
            left = descendants(os.getpid())
            send(signal.SIGTERM, left)
            send(signal.SIGCONT, left)
            self._wait(lambda: not descendants(os.getpid()), LEFT_S)
        self._wait(self._kill_remaining, GUARD_KILL_S)
        self._remove_segments()

    def record_segments(self) -> None:
        """Record the segments that the server's processes have mapped."""
        there = list_segments()
        for name in find_mapped_segments(descendants(os.getpid())):
            if name in there and self._foreign.get(name) != there[name]:
                self._segments[name] = there[name]

    def _remove_segments(self) -> None:
        there = list_segments()
        left = {name for name, number in self._segments.items() if there.get(name) == number}
        if left:
            left -= find_mapped_segments([int(name) for name in os.listdir("/proc") if name.isdigit()])
        for name in left:
            with contextlib.suppress(OSError):
                os.unlink(f"{SHARED_MEMORY}/{name}")

    def reap(self) -> None:
        """Reap the descendants that have died."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self.server:
                    self.code = os.waitstatus_to_exitcode(found[1])

    def _kill_remaining(self) -> bool:
        left = descendants(os.getpid())
        send(signal.SIGKILL, left)
        return not left

    def _wait(self, done: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not done() and time.monotonic() < deadline:
            time.sleep(GUARD_POLL_S)
            self.reap()


def send(number: signal.Signals, processes: list[int]) -> None:
    """Send a signal to the processes that still exist."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def descendants(root: int) -> list[int]:
    """Return the PIDs of all descendants of `root`, including zombies."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = list(children.get(root, []))
    for process in found:
        found += children.get(process, [])
    return found


def list_segments() -> dict[str, int]:
    """Return the inode numbers of this machine's shared memory segments and semaphores, by name."""
    with contextlib.suppress(FileNotFoundError), os.scandir(SHARED_MEMORY) as entries:
        return {entry.name: entry.inode() for entry in entries if entry.is_file(follow_symlinks=False)}
    return {}


def find_mapped_segments(processes: list[int]) -> set[str]:
    """Return the names of the segments that processes have mapped, skipping unreadable processes."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as file:
            found |= {line.rpartition(f" {SHARED_MEMORY}/")[2].rstrip("\n") for line in file if SHARED_MEMORY in line}
    return found


def start(command: list[str]) -> int:
    """Start the server and return its PID. Its first process is killed when the guard dies."""
    guard = os.getpid()

    def before_it_runs() -> None:
        _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(NOT_STARTED)

    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, start_new_session=True, preexec_fn=before_it_runs
    ).pid


def listen_for_signals() -> int:
    """Return a file descriptor from which the numbers of received signals can be read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _do_nothing)
    return reader


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal only has to wake the selector."""


def report(line: str) -> None:
    """Write a line for the parent process."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())


def main(parent_pid: int, grace_s: float, command: list[str]) -> int:
    """Start, watch and end the server; returns the exit code."""
    _prctl(SET_CHILD_SUBREAPER, 1)
    wakeup = listen_for_signals()
    try:
        parent, foreign = os.pidfd_open(parent_pid), list_segments()
        server = start(command) if os.getppid() == parent_pid else None
    except (OSError, subprocess.SubprocessError) as error:
        report(f"failed {error}")
        return NOT_STARTED
    if server is None:
        return NOT_STARTED
    guard = Guard(server, parent, foreign)
    report(f"started {server}")
    cause = guard.watch(wakeup)
    if cause is Cause.ORPHANED:
        os.write(2, b"[agentrl] the process that started this server has exited: ending the server\n")
    guard.end(0.0 if cause is Cause.KILL_REQUESTED else grace_s)
    code = NOT_STARTED if guard.code is None else guard.code
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
