"""Control groups (cgroups v1 and v2), which limit the memory and the processes of a whole sandbox.

The commands of a sandbox share one child group of this process's group. The sandbox's first process stays outside, so
that the group's limits do not kill it. Groups left by a killed process are removed when the next process starts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.sandbox.spec import Limits

PREFIX = "agentrl-"
_CONTROLLERS = ("memory", "pids", "cpu")
_NEEDED = ("memory", "pids")
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Hierarchy of control groups in which this process can create groups."""

    folders: Mapping[str, Path]
    """Folders of this process's group by controller; the same folder for all under v2."""
    version: int


class ControlGroup:
    """Control group for the commands of one sandbox.

    Raises:
        OSError: the kernel does not allow the group to be created.
    """

    def __init__(self, hierarchy: Hierarchy, limits: Limits) -> None:
        name = f"{PREFIX}{os.getpid()}-{process_start(os.getpid())}-{next(_numbers)}"
        self._version = hierarchy.version
        self._folders = {controller: folder / name for controller, folder in hierarchy.folders.items()}
        try:
            for folder in self._all():
                folder.mkdir()
            self._limit(limits)
        except OSError:
            self.remove()
            raise

    def open(self) -> list[int]:
        """Open the file descriptors to which a process writes ``0`` to join the group."""
        return [os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in self._all()]

    def memory_kills(self) -> int:
        """Return the number of processes in the group that the kernel has killed because of its memory limit."""
        file = "memory.events" if self._version == 2 else "memory.oom_control"
        for line in (self._folders["memory"] / file).read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
        return 0

    def remove(self) -> bool:
        """Try to remove the group; returns True if it is removed, which requires that all its processes have ended."""
        left = [folder for folder in self._all() if not _remove(folder)]
        return not left

    def _all(self) -> list[Path]:
        return list(dict.fromkeys(self._folders.values()))

    def _limit(self, limits: Limits) -> None:
        memory, most = self._folders["memory"], str(limits.memory_bytes)
        (memory / ("memory.max" if self._version == 2 else "memory.limit_in_bytes")).write_text(most)
        optional = {"memory.memsw.limit_in_bytes": most, "memory.swap.max": "0", "memory.oom.group": "0"}
        for name, value in optional.items():
            if (memory / name).exists():
                (memory / name).write_text(value)
        (self._folders["pids"] / "pids.max").write_text(str(limits.processes))


@functools.cache
def find_hierarchy() -> Hierarchy | None:
    """Return a hierarchy in which this process may create groups, or ``None``; removes groups of dead processes.

    The result is cached.
    """
    for found in (_version_2(), _version_1()):
        if found is not None and _works(found):
            return found
    return None


def _works(hierarchy: Hierarchy) -> bool:
    for folder in set(hierarchy.folders.values()):
        _sweep(folder)
    try:
        return ControlGroup(hierarchy, Limits(memory_bytes=2**26, processes=8)).remove()
    except OSError:
        return False


def _version_1() -> Hierarchy | None:
    mounts = {option: path for kind, options, path in _mounts() if kind == "cgroup" for option in options.split(",")}
    folders = {
        controller: _own_group(mounts[controller], controller) for controller in _CONTROLLERS if controller in mounts
    }
    return Hierarchy(folders, 1) if set(_NEEDED) <= set(folders) else None


def _version_2() -> Hierarchy | None:
    mounted = next((path for kind, _, path in _mounts() if kind == "cgroup2"), None)
    if mounted is None:
        return None
    folder = _own_group(mounted, "")
    try:
        (folder / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError:
        return None
    return Hierarchy(dict.fromkeys(_NEEDED, folder), 2)


def _mounts() -> Iterator[tuple[str, str, Path]]:
    """Yield the type, options and path of each mount."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split(" ")
        yield kind, options, Path(mount)


def _own_group(mounted: Path, controller: str) -> Path:
    """Return the folder of this process's group; the top folder if the group is not visible, as in containers."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = mounted / path.lstrip("/")
            return own if own.is_dir() else mounted
    return mounted


def _sweep(folder: Path) -> None:
    """Remove groups whose creating process has ended."""
    for group in folder.glob(f"{PREFIX}*"):
        pid, started, _ = group.name.removeprefix(PREFIX).split("-")
        if process_start(int(pid)) != int(started):
            _remove(group)


def process_start(pid: int) -> int:
    """Return the start time of a process in clock ticks, which distinguishes reused PIDs; -1 if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return -1


def _remove(group: Path) -> bool:
    for _ in range(5):
        with contextlib.suppress(OSError):
            group.rmdir()
        if not group.exists():
            return True
        time.sleep(0.001)
    return False
