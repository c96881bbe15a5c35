"""The contract of a sandbox, which runs untrusted code."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Self, TypeAlias, TypedDict

from agentrl.errors import ToolError, UsageError
from agentrl.sandbox.spec import ExecResult, Limits, SandboxSpec

Command: TypeAlias = str | Sequence[str]
"""A text for ``/bin/sh -c``, or a program and its arguments."""
ProtocolFactory: TypeAlias = Callable[[], asyncio.BaseProtocol]
"""Makes the protocol that serves one connection, as `asyncio.loop.create_server` takes it."""
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class CommandOptions(TypedDict, total=False):
    """Options that `Sandbox.exec` and `Sandbox.spawn` share, for back ends that pass them on."""

    cwd: str | None
    env: Mapping[str, str]
    limits: Limits | None


class SandboxFileError(ToolError):
    """A file of a sandbox cannot be read or written: missing, a folder, no room, no permission.

    The policy can react to it, so its text is for the model.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Entry of a folder."""

    name: str
    is_folder: bool


class SandboxProcess(ABC):
    """A program that goes on running in a sandbox, spoken to over pipes. It dies with its sandbox at the latest.

    One task at a time reads, and one writes. A reader that is cancelled loses nothing. Every method raises
    `SandboxError` when the sandbox is gone.
    """

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Send to its standard input, waiting for room.

        Raises:
            BrokenPipeError: it ended, or closed its input.
        """

    @abstractmethod
    async def read(self) -> bytes:
        """Read the next piece of its standard output; empty at the end. A full pipe makes the program wait."""

    @abstractmethod
    async def read_line(self, *, longest: int = 2**20) -> bytes:
        """Read the next line of its standard output with its line feed; without one at the end, and then empty.

        Args:
            longest: Bytes after which a line is cut into several.
        """

    @abstractmethod
    async def wait(self) -> ExecResult:
        """Wait for its end. The result's `stdout` is empty, and its `stderr` the beginning of what it wrote there."""

    @abstractmethod
    async def interrupt(self) -> None:
        """Send SIGINT to it and to what it started, as Ctrl-C does; nothing when it has ended."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill it and all that it started; idempotent."""


class Sandbox(ABC):
    """One isolated place, used by one episode. Its own failures are `SandboxError`, never a command's exit code.

        async with open_sandbox({"type": "local"}) as sandbox:
            await sandbox.write("main.py", b"print(6 * 7)")
            result = await sandbox.exec(["python3", "main.py"])

    Relative paths start at `folder`. Several commands may run at the same time. Every method raises `SandboxError` when
    the sandbox is gone.

    Args:
        spec: What it is like.
    """

    provided_as: ClassVar[str] = "sandbox"
    """A tool's parameter of this type is filled in (see `agentrl.tool`)."""
    folder: str = "/work"
    """Where commands run and relative paths start."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec

    async def start(self) -> None:
        """Make it ready, with the spec's files in it.

        Raises:
            SandboxError: it does not start.
            UsageError: this machine lacks what it needs.
        """
        try:
            await self._start()
            for path, content in self.spec.files.items():
                await self.write(path, content)
        except BaseException:
            await self.close()
            raise

    @abstractmethod
    async def _start(self) -> None:
        """Make it ready, with nothing in it."""

    @abstractmethod
    async def exec(
        self,
        command: Command,
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] = NO_VARIABLES,
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run a command to its end or to a limit; whatever it started dies with it, daemons too.

        Args:
            command: A text for the shell, or a program and its arguments.
            stdin: Its standard input.
            cwd: The folder in which it runs.
            env: Environment variables besides the sandbox's own.
            limits: What it may use, within the sandbox's own limits.
        """

    @abstractmethod
    async def spawn(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] = NO_VARIABLES,
        limits: Limits | None = None,
    ) -> SandboxProcess:
        """Start a program that goes on running, like an interpreter; arguments as in `exec`.

        Only limits that are given count for its time: without `seconds` it may live as long as its sandbox.
        """

    @abstractmethod
    async def read(self, path: str, *, most: int = 16 * 2**20) -> bytes:
        """Read a file with the rights of the code in the sandbox: no path leads out.

        Raises:
            SandboxFileError: no such file, not a plain file, or larger than `most` bytes.
        """

    @abstractmethod
    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Create or replace a file; missing folders are made.

        Raises:
            SandboxFileError: it cannot be written there.
        """

    @abstractmethod
    async def list(self, path: str = ".") -> list[Entry]:
        """List what a folder holds, sorted by name.

        Raises:
            SandboxFileError: no such folder.
        """

    @abstractmethod
    async def snapshot(self) -> bytes:
        """Save the content of `folder` for `restore`; running programs are not in it.

        Raises:
            SandboxFileError: it holds too much.
        """

    @abstractmethod
    async def restore(self, snapshot: bytes) -> None:
        """Restore `folder`, in this sandbox or in another of the same spec; running programs are killed.

        Raises:
            SandboxFileError: there is no room.
        """

    async def forward(self, protocol: ProtocolFactory, *, port: int = 0) -> int:
        """Listen on a port of the sandbox's own 127.0.0.1, whose connections are served in this process.

        It needs no network, and gives programs in the sandbox nothing but what the protocol serves.

        Args:
            protocol: Makes the protocol of each connection.
            port: 0 takes a free one.

        Returns:
            The port, open until the sandbox is closed.

        Raises:
            UsageError: the port is taken, or sandboxes of this type cannot do it.
        """
        raise UsageError(
            "a sandbox of this type forwards no ports",
            got=self.spec.type,
            expected="local or docker, whose network: gateway needs it",
        )

    @abstractmethod
    async def close(self) -> None:
        """Kill everything and leave nothing behind; idempotent."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
