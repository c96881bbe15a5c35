"""Whose a container is: labels name the process that made it, so that what it left behind can be told from the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OWNER, UNTIL = "agentrl.owner", "agentrl.until"
"""Labels: the process, and the time (seconds since 1970) at which the container has ended itself."""
SLACK_S = 60.0
"""How much clocks of machines may differ."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process."""

    machine: str
    """This boot of this machine, and the namespace in which `pid` counts."""
    pid: int
    started: int
    """In the kernel's ticks: numbers of processes are used again."""

    @classmethod
    def this(cls) -> Owner:
        """This process."""
        return cls(_machine(), os.getpid(), _started(os.getpid()))

    @classmethod
    def read(cls, label: str) -> Owner | None:
        """What a label says; ``None`` when it is none of ours."""
        machine, _, rest = label.partition("/")
        pid, _, started = rest.partition("/")
        return cls(machine, int(pid), int(started)) if pid.isdigit() and started.lstrip("-").isdigit() else None

    def __str__(self) -> str:
        return f"{self.machine}/{self.pid}/{self.started}"


def labels(life_s: float, now: float) -> dict[str, str]:
    """Of a container that this process starts.

    Args:
        life_s: Seconds after which it has ended itself.
        now: Seconds since 1970.
    """
    return {OWNER: str(Owner.this()), UNTIL: f"{now + life_s:.0f}"}


def is_left_behind(told: Mapping[str, str], now: float) -> bool:
    """Whether nobody will miss a container with these labels: its owner has ended, or its time is over.

    Whether the owner lives can only be told on its own machine.
    """
    owner, until = Owner.read(told.get(OWNER, "")), told.get(UNTIL, "")
    if owner is None:
        return False
    is_over = until.isdigit() and now > float(until) + SLACK_S
    return is_over or (owner.machine == _machine() and _started(owner.pid) != owner.started)


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"


def _started(pid: int) -> int:
    """When a process started; -1 where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return -1
