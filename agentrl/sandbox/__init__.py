"""The contract of a sandbox: where code that nobody vouches for runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a command may use; ``None`` leaves the sandbox's own limit."""

    seconds: float | None = None
    memory_bytes: int | None = None
    processes: int | None = None
    output_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    """Output beyond the limit was dropped."""


class Sandbox(ABC):
    """One isolated place, used by one episode. Its own failures are `SandboxError`, never a command's exit code."""

    @abstractmethod
    async def start(self) -> None:
        """Make it ready."""

    @abstractmethod
    async def exec(self, argv: Sequence[str], *, stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
        """Run a command to its end or to a limit; whatever it started dies with it."""

    @abstractmethod
    async def read(self, path: str) -> bytes:
        """A file's content; paths that leave the sandbox are refused."""

    @abstractmethod
    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file."""

    @abstractmethod
    async def close(self) -> None:
        """Kill everything and leave nothing behind; idempotent."""
