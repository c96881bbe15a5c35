"""Guard that ends the programs of in-process environments when the trainer is killed.

Such programs are children of the trainer, so nothing else ends them. The trainer sets a mark in its environment
variables, which programs inherit, even in their own session and through other programs. When the trainer exits without
closing the guard, the guard ends all processes that have the mark.

The guard misses programs that get other environment variables (``env -i``,
``subprocess.Popen(env={})``) or run as another user, and processes that are forked without starting a program
(``multiprocessing`` with ``fork``). agentrl's own servers and ranks have their own guards, and no mark.

Run by file name, using the standard library only. Linux only.

    python orphan_guard.py TRAINER_PID MARK
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "AGENTRL_TRAINER"
"""Environment variable with the trainer's mark."""
SET_PARENT_DEATH_SIGNAL = 1
ORPHAN_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL."""
ORPHAN_KILL_S = 10.0
"""Seconds to wait for killed processes; a process that hangs in the kernel is ignored after that."""
ORPHAN_POLL_S = 0.02


class OrphanGuard:
    """Guard process of this process. Once it is closed, environments must end their own programs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Mark this process's environment variables and start the guard, unless it is running; Linux only."""
        if self._process is not None or sys.platform != "linux":
            return
        mark = os.environ[VARIABLE] = f"{os.getpid()}-{_start_time(os.getpid())}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=without_mark(os.environ),
            start_new_session=True,
        )

    def close(self) -> None:
        """End the guard. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __del__(self) -> None:
        """End the guard of an environment pool that was never closed."""
        with contextlib.suppress(Exception):  # the interpreter may be shutting down
            self.close()


def without_mark(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without the mark, for processes that end themselves after the trainer."""
    return {name: value for name, value in variables.items() if name != VARIABLE}


def _start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks, which distinguishes processes with the same PID; 0 if gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def marked_processes(mark: str, variable: str = VARIABLE) -> list[int]:
    """Return the PIDs of this user's living processes that were started with the mark."""
    entry, found = f"{variable}={mark}".encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if entry in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def send(number: signal.Signals, processes: list[int]) -> None:
    """Send a signal to the processes that still exist."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def end_marked(mark: str) -> None:
    """Terminate the processes with the mark, and kill those that remain."""
    send(signal.SIGTERM, marked_processes(mark))
    send(signal.SIGCONT, marked_processes(mark))  # stopped processes do not handle SIGTERM
    began = time.monotonic()
    while (left := marked_processes(mark)) and time.monotonic() - began < ORPHAN_GRACE_S + ORPHAN_KILL_S:
        if time.monotonic() - began > ORPHAN_GRACE_S:
            for number in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process cannot fork
                send(number, left)
        time.sleep(ORPHAN_POLL_S)


def main(trainer: int, mark: str) -> None:
    """Wait for the end of the trainer, then end its programs."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGCONT, 0, 0, 0)  # wakes a stopped guard
    with contextlib.suppress(ProcessLookupError):
        poll = select.poll()
        poll.register(os.pidfd_open(trainer), select.POLLIN)
        if os.getppid() == trainer:
            poll.poll()
    end_marked(mark)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
