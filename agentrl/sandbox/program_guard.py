"""The program between this process and a program of somebody else, of which nothing is left once it has ended.

Run by its file name, on the standard library alone:

    python program_guard.py PARENT_PID COMMAND [ARGUMENT]...

It is the subreaper of its descendants: whoever leaves the program's session, or is left by its parent, stays one of
them. They are killed when the program has ended, on SIGTERM, and when the process that started this one is gone.
Standard streams are the program's. The exit code is the program's, or 128 + N after signal N. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36
"""Numbers of prctl(2)."""
KILL_S = 5.0
"""Seconds in which killed processes must be gone."""
ROUND_S = 0.005
NOT_STARTED = 127
"""Exit code of a command that cannot be started."""


def children_of(parent: int) -> set[int]:
    """Return the processes below a process, of all generations."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    new = {parent}
    while new:
        new = {pid for pid, above in parents.items() if above in new} - found
        found |= new
    return found


def kill_all() -> bool:
    """Kill all descendants, and those that they start meanwhile; ``False`` if some are left."""
    until = time.monotonic() + KILL_S
    while time.monotonic() < until:
        left = children_of(os.getpid())
        for step in (signal.SIGSTOP, signal.SIGKILL):  # who is stopped starts no others while the rest is killed
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, step)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            return True
        time.sleep(ROUND_S)
    return False


def main() -> int:
    """Run a command, and return the exit code."""
    parent, *command = sys.argv[1:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if os.getppid() != int(parent):
            return 128 + signal.SIGTERM
        code = subprocess.Popen(command, start_new_session=True).wait()
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return NOT_STARTED
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not kill_all():
            os.kill(os.getpid(), signal.SIGKILL)  # as if it had been killed: what is left may do what it likes
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
