"""Processes of a run, found by an environment variable even if their parents have ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from agentrl.sandbox.orphan_guard import marked_processes
from agentrl.sandbox.supervisor import process_parents, send_signal
from agentrl.testing.chaos.plan import Target

MARK = "AGENTRL_CHAOS"
"""Environment variable that a process of a run and all its descendants share."""
PROCESS_POLL_S = 0.05
PAUSE_S = 2.0
"""Seconds between SIGSTOP and SIGCONT."""


def find_processes(target: Target, mark: str, trainer: int) -> list[int]:
    """Return the possible targets of a fault, in a fixed order."""
    lines = {pid: command_line(pid) for pid in marked_processes(mark, MARK) if pid != trainer}
    if target is Target.RANK:
        return sorted(pid for pid, line in lines.items() if "agentrl.builders.workers" in line)
    parents = process_parents()
    both = {pid for pid, line in lines.items() if "agentrl.rollout.env_worker" in line}
    supervisors = {pid for pid in both if parents.get(pid) == trainer}
    return sorted(supervisors if target is Target.SUPERVISOR else both - supervisors)


def command_line(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return " ".join(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").split())
    except OSError:
        return ""


def send(way: str, pid: int) -> None:
    """Send the signals that a fault names, such as ``SIGSTOP, SIGCONT``."""
    first, _, second = way.partition(", ")
    send_signal(pid, signal.Signals[first])
    if second:
        time.sleep(PAUSE_S)
        send_signal(pid, signal.Signals[second])


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; return False after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(PROCESS_POLL_S)
    return True


def kill_left(marks: Iterable[str]) -> list[str]:
    """Kill all processes with one of the marks; return their command lines."""
    found = []
    for mark in marks:
        for pid in marked_processes(mark, MARK):
            found.append(command_line(pid))
            send_signal(pid, signal.SIGKILL)
    return found
