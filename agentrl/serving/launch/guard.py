"""The program between this process and a server: it starts the server, and ends everything that the server started.

Run by its file name, on the standard library alone. It ends the server's whole tree when its standard input closes,
when the process that started it is gone however that died, or when the server's first process ends. It lives in a
session of its own, so nothing sent to the trainer's or the server's process group reaches it; and it is the subreaper
of its descendants, so that also those which left the server's session stay its own. Linux only.

    python guard.py PARENT_PID GRACE_S COMMAND [ARGUMENT]...

Standard output is one line: ``started PID``, or ``failed REASON``. The server writes to what is standard error here. On
standard input an ``e`` ends the server, a ``k`` kills it. The exit code is the server's; 128 + N after a signal N.

Killed processes leave their shared memory behind. This program looks now and then which segments the server's processes
have mapped, and in the end removes those that no process has and that did not exist before the server.
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
POLL_S = 0.02
LEFT_S = 1.0
"""Seconds that the others get once the first process has ended."""
KILL_S = 10.0
"""Seconds that killed processes get to vanish; one that hangs in the kernel is left to it."""
NOT_STARTED = 127
SHARED_MEMORY = "/dev/shm"
LOOK_S = 10.0
"""Seconds between two looks at the segments; a last one comes before the end, unless all processes die at once."""

_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Cause(Enum):
    """Cause of a server's end."""

    ENDED = auto()
    """Its first process ended."""
    END_REQUESTED = auto()
    KILL_REQUESTED = auto()
    """The server is to be killed."""
    ORPHANED = auto()
    """Standard input closed without an instruction, or the process that started this one is gone."""


INSTRUCTIONS = {b"e": Cause.END_REQUESTED, b"k": Cause.KILL_REQUESTED}


class Guard:
    """Guard of one server.

    Args:
        server: Its first process, the leader of a session.
        parent: Process descriptor of the program that started this one.
        foreign: The segments that existed before the server, from `list_segments`.
    """

    def __init__(self, server: int, parent: int, foreign: dict[str, int]) -> None:
        self.server = server
        self.parent = parent
        self.code: int | None = None
        self._foreign = foreign
        self._segments: dict[str, int] = {}

    def watch(self, wakeup: int) -> Cause:
        """Wait until the server has to end."""
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
        """Ask the first process to end, give it `grace_s`; then ask, and soon kill, all that is left; 0 only kills."""
        self.record_segments()
        if self.code is None and grace_s > 0:
            send(signal.SIGTERM, [self.server])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.server, signal.SIGCONT)  # one that was stopped could not obey
            self._wait(lambda: self.code is not None, grace_s)
        if grace_s > 0:  # what is left may have shared memory to give back
            left = descendants(os.getpid())
            send(signal.SIGTERM, left)
            send(signal.SIGCONT, left)
            self._wait(lambda: not descendants(os.getpid()), LEFT_S)
        self._wait(self._kill_remaining, KILL_S)
        self._remove_segments()

    def record_segments(self) -> None:
        """Remember which segments the server's processes have."""
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
            time.sleep(POLL_S)
            self.reap()


def send(number: signal.Signals, processes: list[int]) -> None:
    """Send a signal to the processes that still exist."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def descendants(root: int) -> list[int]:
    """Return the processes below `root`, including zombies."""
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
    """Return the segments of shared memory and the semaphores on this machine: their inode numbers by name."""
    with contextlib.suppress(FileNotFoundError), os.scandir(SHARED_MEMORY) as entries:
        return {entry.name: entry.inode() for entry in entries if entry.is_file(follow_symlinks=False)}
    return {}


def find_mapped_segments(processes: list[int]) -> set[str]:
    """Names of the segments that processes have mapped, as far as this process may read them."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as file:
            found |= {line.rpartition(f" {SHARED_MEMORY}/")[2].rstrip("\n") for line in file if SHARED_MEMORY in line}
    return found


def start(command: list[str]) -> int:
    """Start the server; the first process dies with this one even when this one is killed."""
    guard = os.getpid()

    def before_it_runs() -> None:
        _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(NOT_STARTED)

    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, start_new_session=True, preexec_fn=before_it_runs
    ).pid


def listen_for_signals() -> int:
    """Return a descriptor that gives the numbers of the signals that arrive."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _do_nothing)
    return reader


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Only the wake-up matters."""


def report(line: str) -> None:
    """Tell the process that started this one."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())


def main(parent_pid: int, grace_s: float, command: list[str]) -> int:
    """Start the server, watch it, end it; returns the exit code."""
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
        os.write(2, b"[agentrl] the process that started this server is gone: ending it\n")
    guard.end(0.0 if cause is Cause.KILL_REQUESTED else grace_s)
    code = NOT_STARTED if guard.code is None else guard.code
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
