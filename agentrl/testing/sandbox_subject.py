"""Subject of the sandbox check: sandboxes with tight limits, and the state of this machine before and after."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentrl.sandbox import ExecResult, Limits, Sandbox, SandboxSpec, open_sandbox
from agentrl.sandbox.control_groups import PREFIX, find_hierarchy
from agentrl.serving.launch.guard import descendants
from agentrl.testing.report import RuleFailed, RuleSkipped, require

T = TypeVar("T")
MIB = 2**20
TIGHT = Limits(
    seconds=30.0,
    cpu_seconds=4.0,
    memory_bytes=128 * MIB,
    processes=32,
    file_bytes=8 * MIB,
    disk_bytes=16 * MIB,
    output_bytes=MIB // 16,
)
"""Limits of attacked sandboxes."""
RULE_GRACE_S = 8.0
"""Tolerance in seconds by which a command may exceed its time limit on a busy machine."""
_POLLS = 500


@dataclass(frozen=True, slots=True)
class MachineState:
    """State of this machine that a sandbox must restore."""

    processes: frozenset[int]
    """Descendants of this process."""
    handles: int
    """Number of open files of this process."""
    folders: frozenset[str]
    """Control groups and temporary folders named after this process."""

    @classmethod
    def now(cls) -> MachineState:
        """Read the current state."""
        hierarchy = find_hierarchy()
        roots = {Path(tempfile.gettempdir()), *(hierarchy.folders.values() if hierarchy is not None else ())}
        folders = frozenset(str(path) for root in roots for path in root.glob(f"{PREFIX}{os.getpid()}-*"))
        return cls(frozenset(descendants(os.getpid())), len(os.listdir("/proc/self/fd")), folders)

    def changes(self, later: MachineState) -> str:
        """Describe the additions of a later state; empty if there are none."""
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
    """Back end under check."""

    spec: SandboxSpec

    def open(self) -> Sandbox:
        """Make another sandbox without starting it."""
        return open_sandbox(dataclasses.replace(self.spec, limits=TIGHT, files={}))

    @asynccontextmanager
    async def open_for_attack(self) -> AsyncIterator[Sandbox]:
        """Open a sandbox to attack; afterwards it and a second one must still work and leave nothing behind.

        Raises:
            RuleFailed: a sandbox does not work, or something is left behind.
        """
        before = MachineState.now()
        async with self.open() as neighbour:
            async with self.open() as sandbox:
                yield sandbox
                await require_alive(sandbox, "after the attack the sandbox does not work")
            await require_alive(neighbour, "after the attack another sandbox does not work")
        await require_nothing_left(before)


def in_sandbox(rule: Callable[[Sandbox], Awaitable[T]]) -> Callable[[SandboxSubject], Awaitable[T]]:
    """Turn a rule about a sandbox into a rule about a back end, by `SandboxSubject.open_for_attack`."""

    @functools.wraps(rule)
    async def check(subject: SandboxSubject) -> T:
        async with subject.open_for_attack() as sandbox:
            return await rule(sandbox)

    return check


async def require_nothing_left(before: MachineState) -> None:
    """Wait until the machine has returned to an earlier state.

    Raises:
        RuleFailed: something remains.
    """
    for _ in range(_POLLS):
        left = before.changes(MachineState.now())
        if not left:
            return
        await asyncio.sleep(0.02)
    raise RuleFailed(f"left after close: {left}")


@contextmanager
def host_file(content: str) -> Iterator[Path]:
    """Create a file on the host that all users can read and write, in its own temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "secret.txt"
        file.write_text(content)
        Path(folder).chmod(0o777)
        file.chmod(0o666)
        yield file


@contextmanager
def bystander(**variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a sleeping process on the host with these environment variables."""
    process = subprocess.Popen(["/bin/sleep", "543"], env=variables)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def run_python(sandbox: Sandbox, program: str, *words: str, limits: Limits | None = None) -> ExecResult:
    """Run an attack written in Python.

    Raises:
        RuleSkipped: the sandbox has no Python.
    """
    result = await sandbox.exec(["python3", "-c", textwrap.dedent(program), *words], limits=limits)
    if result.exit_code == 127:
        raise RuleSkipped("no python3 found in the sandbox")
    return result


def text(result: ExecResult) -> str:
    """Return the standard output without leading and trailing white space."""
    return result.stdout.decode(errors="replace").strip()


def describe_end(result: ExecResult) -> str:
    """Describe how a command ended, for messages."""
    return f"exit {result.exit_code}, {result.stdout[-200:]!r}, {result.stderr[-300:]!r}"


async def require_alive(sandbox: Sandbox, otherwise: str) -> None:
    """Raise `RuleFailed` with the text `otherwise` unless the sandbox runs a command."""
    result = await sandbox.exec("echo here")
    require(result.stdout == b"here\n", f"{otherwise}: {describe_end(result)}")
