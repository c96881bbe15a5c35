"""Guard of an external program: kills all processes that the program leaves behind.

Run by file name, using the standard library only:

    python program_guard.py PARENT_PID COMMAND [ARGUMENT]...

The guard is the subreaper of its descendants, so processes that leave the program's session or lose their parent remain
its descendants. It kills them when the program ends, on SIGTERM, and when its parent process exits. The program
inherits the standard streams. The exit code is the program's, or 128 + N after signal N. Linux only.
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
PROGRAM_KILL_S = 5.0
"""Timeout in seconds for the end of killed processes."""
ROUND_S = 0.005
NOT_STARTED = 127
"""Exit code of a command that cannot be started."""


def children_of(parent: int) -> set[int]:
    """Return the PIDs of all descendants of a process."""
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


def _own_descendants() -> set[int]:
    """Return the PIDs of all descendants of this process; faster than `children_of` if the kernel lists children."""
    found, new = set[int](), {os.getpid()}
    while new:
        pid = new.pop()
        for thread in _entries(f"/proc/{pid}/task"):
            try:
                children = set(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
            except ProcessLookupError:
                continue
            except FileNotFoundError:
                if not Path("/proc/thread-self/children").exists():
                    return children_of(os.getpid())
                continue
            new |= children - found
            found |= children
    return found


def _entries(folder: str) -> list[str]:
    """Return the names in a folder of /proc; none if the process has ended."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def kill_all() -> bool:
    """Kill all descendants, including those started in the meantime; returns False if some are left.

    A process that forks and exits again and again may be in no listing. The guard adopts it, though, so descendants are
    left as long as the guard has a child.
    """
    until, known = time.monotonic() + PROGRAM_KILL_S, set[int]()
    while time.monotonic() < until:
        left = _own_descendants()
        for step in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process cannot fork while the others are killed
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, step)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        if left and left <= known:  # nothing new was started
            time.sleep(ROUND_S)
        known |= left
    return False


def main() -> int:
    """Run a command and return its exit code."""
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
            os.kill(os.getpid(), signal.SIGKILL)  # signals to the caller that processes are left
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
