"""Contract of a sandbox, which runs untrusted code."""

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
"""Text for ``/bin/sh -c``, or a program and its arguments."""
ProtocolFactory: TypeAlias = Callable[[], asyncio.BaseProtocol]
"""Protocol factory, called once per connection as by `asyncio.loop.create_server`."""
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class CommandOptions(TypedDict, total=False):
    """Options that `Sandbox.exec` and `Sandbox.spawn` share, for back ends that pass them on."""

    cwd: str | None
    env: Mapping[str, str]
    limits: Limits | None


class SandboxFileError(ToolError):
    """A file in a sandbox cannot be read or written: it is missing, is a folder, or space or permission is lacking.

    The model is shown the message, because the policy can react to it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Entry of a folder."""

    name: str
    is_folder: bool


class SandboxProcess(ABC):
    """Program that keeps running in a sandbox, with pipes for input and output. It ends no later than its sandbox.

    Only one task at a time may read, and one may write. A cancelled read loses no data. Every method raises
    `SandboxError` if the sandbox is gone.
    """

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to the program's standard input; waits while the pipe is full.

        Raises:
            BrokenPipeError: the program has ended or closed its input.
        """

    @abstractmethod
    async def read(self) -> bytes:
        """Read the next part of the program's standard output; empty at the end. A full pipe blocks the program."""

    @abstractmethod
    async def read_line(self, *, longest: int = 2**20) -> bytes:
        """Read the next line of standard output, including its line feed; empty at the end.

        The last line may lack a line feed.

        Args:
            longest: Maximum bytes of a line; longer lines are split.
        """

    @abstractmethod
    async def wait(self) -> ExecResult:
        """Wait until the program ends. The result's `stdout` is empty; `stderr` is standard error, up to the limit."""

    @abstractmethod
    async def interrupt(self) -> None:
        """Send SIGINT to the program and its children, as Ctrl-C does; does nothing if it has ended."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill the program and all processes that it started; idempotent."""


class Sandbox(ABC):
    """Isolated environment for commands, used by one episode. Failures of the sandbox raise `SandboxError`.

        async with open_sandbox({"type": "local"}) as sandbox:
            await sandbox.write("main.py", b"print(6 * 7)")
            result = await sandbox.exec(["python3", "main.py"])

    Relative paths start at `folder`. Several commands may run at the same time. Every method raises `SandboxError` if
    the sandbox is gone.
    """

    provided_as: ClassVar[str] = "sandbox"
    """Name under which the runtime passes the sandbox to a tool's parameter of this type (see `agentrl.tool`)."""
    folder: str = "/work"
    """Working folder of commands, at which relative paths start."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec

    async def start(self) -> None:
        """Start the sandbox and write the spec's files.

        Raises:
            SandboxError: the sandbox does not start.
            UsageError: this machine does not meet its requirements.
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
        """Start the sandbox, without the spec's files."""

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
        """Run a command until it ends or exceeds a limit, then kill all processes that it started, including daemons.

        Args:
            command: Text for the shell, or a program and its arguments.
            stdin: Standard input of the command.
            cwd: Working folder; `folder` by default.
            env: Environment variables in addition to the sandbox's.
            limits: Limits of the command, within the sandbox's limits.
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
        """Start a program that keeps running, such as an interpreter; arguments as in `exec`.

        The sandbox's time limits do not apply: without `seconds` in `limits`, it may run as long as the sandbox.
        """

    @abstractmethod
    async def read(self, path: str, *, most: int = 16 * 2**20) -> bytes:
        """Read a file with the permissions of the code in the sandbox, so that no path escapes from it.

        Raises:
            SandboxFileError: the file does not exist, is not a regular file, or is larger than `most` bytes.
        """

    @abstractmethod
    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Create or replace a file; missing folders are created.

        Raises:
            SandboxFileError: the file cannot be written.
        """

    @abstractmethod
    async def list(self, path: str = ".") -> list[Entry]:
        """List the entries of a folder, sorted by name.

        Raises:
            SandboxFileError: the folder does not exist.
        """

    @abstractmethod
    async def snapshot(self) -> bytes:
        """Save the content of `folder` for `restore`, without running programs.

        Raises:
            SandboxFileError: the content is too large.
        """

    @abstractmethod
    async def restore(self, snapshot: bytes) -> None:
        """Restore `folder`, in this sandbox or in another one of the same spec; running programs are killed.

        Raises:
            SandboxFileError: there is not enough space.
        """

    async def forward(self, protocol: ProtocolFactory, *, port: int = 0) -> int:
        """Listen on a port of the sandbox's 127.0.0.1, and serve its connections in this process.

        This needs no network, and gives programs in the sandbox access to the protocol's service only.

        Args:
            protocol: Factory of each connection's protocol.
            port: Port to listen on; 0 for a free one.

        Returns:
            The port, which stays open until the sandbox is closed.

        Raises:
            UsageError: the port is in use, or sandboxes of this type do not support it.
        """
        raise UsageError(
            "sandboxes of this type do not forward ports",
            got=self.spec.type,
            expected="local or docker, whose network: gateway needs it",
        )

    @abstractmethod
    async def close(self) -> None:
        """Kill all processes and release all resources; idempotent."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
