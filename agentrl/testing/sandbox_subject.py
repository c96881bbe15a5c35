"""Subject of the sandbox check: sandboxes with tight limits, and this machine as it is before and after."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import subprocess
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from agentrl.sandbox import ExecResult, Limits, Sandbox, SandboxSpec, open_sandbox
from agentrl.sandbox.control_groups import PREFIX, find_hierarchy
from agentrl.serving.launch.guard import descendants
from agentrl.testing.report import Broken, Missing, require

T = TypeVar("T")
MIB = 2**20
TIGHT = Limits(
    seconds=4.0,
    cpu_seconds=4.0,
    memory_bytes=128 * MIB,
    processes=32,
    file_bytes=8 * MIB,
    disk_bytes=16 * MIB,
    output_bytes=MIB // 16,
)
"""The limits of attacked sandboxes."""
GRACE_S = 8.0
"""How much later than its limit a command may end, on a busy machine."""
_LOOKS = 500


@dataclass(frozen=True, slots=True)
class MachineState:
    """State of this machine that a sandbox may not change for good."""

    processes: frozenset[int]
    """Those that descend from this one."""
    handles: int
    folders: frozenset[str]
    """Control groups and temporary folders that are named after this process."""

    @classmethod
    def now(cls) -> MachineState:
        """Look at the machine as it is."""
        hierarchy = find_hierarchy()
        places = {Path(tempfile.gettempdir()), *(hierarchy.folders.values() if hierarchy is not None else ())}
        folders = frozenset(str(path) for place in places for path in place.glob(f"{PREFIX}{os.getpid()}-*"))
        return cls(frozenset(descendants(os.getpid())), len(os.listdir("/proc/self/fd")), folders)

    def changes(self, later: MachineState) -> str:
        """Describe what there is more later; empty when nothing is."""
        more = []
        if left := later.processes - self.processes:
            more.append(f"processes {', '.join(map(str, sorted(left)))}")
        if later.handles > self.handles:
            more.append(f"{later.handles - self.handles} open files")
        if folders := later.folders - self.folders:
            more.append(", ".join(sorted(folders)))
        return " and ".join(more)


@dataclass(slots=True)
class SandboxSubject:
    """The back end that is checked."""

    spec: SandboxSpec
    _has_python: bool | None = field(default=None, init=False)

    def open(self) -> Sandbox:
        """Make one more sandbox, not started."""
        return open_sandbox(dataclasses.replace(self.spec, limits=TIGHT, files={}))

    @asynccontextmanager
    async def attacked(self) -> AsyncIterator[Sandbox]:
        """Open a sandbox to be attacked: afterwards it and its neighbour must still work, and leave nothing behind.

        Raises:
            Broken: they do not, or do.
        """
        before = MachineState.now()
        async with self.open() as neighbour:
            async with self.open() as sandbox:
                yield sandbox
                await require_alive(sandbox, "after the attack the sandbox does not work")
            await require_alive(neighbour, "after the attack another sandbox does not work")
        await require_nothing_left(before)


def in_sandbox(rule: Callable[[Sandbox], Awaitable[T]]) -> Callable[[SandboxSubject], Awaitable[T]]:
    """Make a rule about the back end of one about a single sandbox, opened with `SandboxSubject.attacked`."""

    @functools.wraps(rule)
    async def look(subject: SandboxSubject) -> T:
        async with subject.attacked() as sandbox:
            return await rule(sandbox)

    return look


async def require_nothing_left(before: MachineState) -> None:
    """Wait until the machine is as it was.

    Raises:
        Broken: it does not get there.
    """
    for _ in range(_LOOKS):
        left = before.changes(MachineState.now())
        if not left:
            return
        await asyncio.sleep(0.02)
    raise Broken(f"after close there are {left}")


@contextmanager
def host_file(content: str) -> Iterator[Path]:
    """Make a file of this machine that all users may read and write, alone in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "secret.txt"
        file.write_text(content)
        Path(folder).chmod(0o777)
        file.chmod(0o666)
        yield file


@contextmanager
def bystander(**variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of this machine that only sleeps, with these environment variables."""
    process = subprocess.Popen(["/bin/sleep", "543"], env=variables)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def run_python(sandbox: Sandbox, program: str, *words: str, limits: Limits | None = None) -> ExecResult:
    """Run an attack that is written in Python.

    Raises:
        Missing: the sandbox has no Python.
    """
    result = await sandbox.exec(["python3", "-c", textwrap.dedent(program), *words], limits=limits)
    if result.exit_code == 127:
        raise Missing("there is no python3 in the sandbox")
    return result


def text(result: ExecResult) -> str:
    """Return the standard output without space at its ends."""
    return result.stdout.decode(errors="replace").strip()


def ending(result: ExecResult) -> str:
    """Describe how it ended, for messages."""
    return f"exit {result.exit_code}, {result.stdout[-200:]!r}, {result.stderr[-300:]!r}"


async def require_alive(sandbox: Sandbox, otherwise: str) -> None:
    """Raise `Broken` with the text `otherwise` unless the sandbox runs a command."""
    result = await sandbox.exec("echo here")
    require(result.stdout == b"here\n", f"{otherwise}: {ending(result)}")
