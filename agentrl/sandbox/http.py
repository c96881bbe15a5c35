"""Back end ``http``: a sandbox on another machine, behind `agentrl sandbox serve`.

Each call has an id and is executed once: a retry gets the answer of the first attempt. This module encodes and decodes
the values of the protocol (``docs/sandboxes.md``) for both sides.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import secrets
from collections.abc import Coroutine, Mapping
from typing import Any, Unpack

from agentrl.errors import EnvironmentFailure, SandboxError, ToolError, UsageError
from agentrl.remote.link import Link
from agentrl.sandbox.contract import Command, CommandOptions, Entry, Sandbox, SandboxFileError, SandboxProcess
from agentrl.sandbox.spec import DEFAULT_LIMITS, ExecResult, Limits, SandboxSpec
from agentrl.sandbox.supervised import PollingProcess

PROTOCOL = "agentrl-sandbox"
VERSION = 1
SANDBOXES = f"/v{VERSION}/sandboxes"
TOKEN_VARIABLE = "AGENTRL_SANDBOX_TOKEN"
"""Environment variable with the token that a server requires and a client sends."""
MAX_CALL_BYTES = 4 * 2**20
"""Maximum bytes of a request without a file, snapshot or standard input."""
MAX_INPUT_BYTES = 32 * 2**20
"""Maximum bytes of a request with the standard input of a program."""
MAX_REQUEST_BYTES = 512 * 2**20
"""Maximum bytes of any request, regardless of the sandbox's limits."""
SANDBOX_PATIENCE_S = 20.0
"""Seconds for which calls to an unreachable or full server are retried; the option ``patience_s`` overrides it."""
SANDBOX_CLOSE_S = 5.0
"""Maximum seconds that `close` waits for the server, which closes abandoned sandboxes on its own."""


def write_bytes(data: bytes) -> str:
    """Encode bytes as base64 text for JSON."""
    return base64.b64encode(data).decode()


def read_bytes(text: str) -> bytes:
    """Decode the output of `write_bytes`.

    Raises:
        ValueError: the text is not base64.
    """
    return base64.b64decode(text, validate=True)


def largest_request(method: str, limits: Limits) -> int:
    """Return the maximum bytes of a call: the sandbox's size limits, in base64."""
    match method:
        case "write":
            held = limits.file_bytes or MAX_REQUEST_BYTES
        case "restore":
            held = limits.disk_bytes or MAX_REQUEST_BYTES
        case "exec" | "process_write":
            return MAX_INPUT_BYTES
        case _:
            return MAX_CALL_BYTES
    return min(MAX_REQUEST_BYTES, held * 3 // 2 + MAX_CALL_BYTES)


def write_result(result: ExecResult) -> dict[str, Any]:
    """Encode the result of a command."""
    return {**dataclasses.asdict(result), "stdout": write_bytes(result.stdout), "stderr": write_bytes(result.stderr)}


def read_result(data: Mapping[str, Any]) -> ExecResult:
    """Decode the output of `write_result`."""
    return ExecResult(**{**data, "stdout": read_bytes(data["stdout"]), "stderr": read_bytes(data["stderr"])})


def changed_limits(limits: Limits) -> list[str]:
    """Return the names of the limits that differ from the defaults; a server must not lower them silently."""
    return [name for name, value in limits.non_null.items() if value != DEFAULT_LIMITS.non_null[name]]


class HttpSandbox(Sandbox):
    """Sandbox behind a sandbox server.

    Args:
        spec: Specification with `url`; the server rejects what it does not support.

    Raises:
        UsageError: the spec has no `url`, or an option is unknown.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        if spec.url is None:
            raise UsageError(
                "an http sandbox needs an address",
                expected="url: http://HOST:PORT",
                hint="start a server on that host: agentrl sandbox serve --port PORT",
            )
        if spec.uses_gateway:
            raise UsageError(
                "the gateway cannot be reached from an http sandbox", got=spec.network, expected="type local or docker"
            )
        unknown = spec.options.keys() - {"patience_s"}
        if unknown:
            raise UsageError("an option of http sandboxes is invalid", got=min(unknown), expected="patience_s")
        self._patience_s = float(spec.options.get("patience_s", SANDBOX_PATIENCE_S))
        self._link = Link(spec.url.rstrip("/"), service="sandbox server", token_variable=TOKEN_VARIABLE)
        self._route = f"{SANDBOXES}/{secrets.token_hex(16)}"
        self._is_open = False
        self._calls: set[asyncio.Task[Any]] = set()

    async def _start(self) -> None:
        self._is_open = True
        wanted = {
            "limits": self.spec.limits.non_null,
            "demanded": changed_limits(self.spec.limits),
            "env": dict(self.spec.env),
            "network": self.spec.network,
            "image": self.spec.image,
        }
        self.folder = (await self._ask("PUT", "", wanted))["folder"]

    async def exec(self, command: Command, *, stdin: bytes = b"", **options: Unpack[CommandOptions]) -> ExecResult:
        """See `Sandbox.exec`."""
        return read_result(await self.call("exec", stdin=write_bytes(stdin), **_write_command(command, **options)))

    async def spawn(self, command: Command, **options: Unpack[CommandOptions]) -> SandboxProcess:
        """See `Sandbox.spawn`."""
        return HttpProcess(self, (await self.call("spawn", **_write_command(command, **options)))["process"])

    async def read(self, path: str, *, most: int = 16 * 2**20) -> bytes:
        """See `Sandbox.read`."""
        return read_bytes((await self.call("read", path=path, most=most))["data"])

    async def write(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """See `Sandbox.write`."""
        await self.call("write", path=path, data=write_bytes(data), executable=executable)

    async def list(self, path: str = ".") -> list[Entry]:
        """See `Sandbox.list`."""
        return [Entry(**entry) for entry in (await self.call("list", path=path))["entries"]]

    async def snapshot(self) -> bytes:
        """See `Sandbox.snapshot`."""
        return read_bytes((await self.call("snapshot"))["data"])

    async def restore(self, snapshot: bytes) -> None:
        """See `Sandbox.restore`."""
        await self.call("restore", data=write_bytes(snapshot))

    async def close(self) -> None:
        """See `Sandbox.close`."""
        is_open, self._is_open = self._is_open, False
        if is_open:
            with contextlib.suppress(SandboxError, UsageError, TimeoutError):
                async with asyncio.timeout(SANDBOX_CLOSE_S):
                    await self._ask("DELETE", "", None, patience_s=0.0)
        calls = set(self._calls)
        for task in calls:
            task.cancel()
        if calls:
            await asyncio.wait(calls)
        await self._link.close()

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the server's sandbox; if this is cancelled, the server stops the method.

        Raises:
            SandboxError: the server or its sandbox is lost.
            SandboxFileError: the method raised it.
        """
        if not self._is_open:
            raise SandboxError("the sandbox is closed")
        number = secrets.token_hex(16)
        asking = self._start_call(self._ask("POST", f"/{method}", {"id": number, **arguments}))
        try:
            return await asking
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and not current.cancelling():  # cancelled by `close`
                raise SandboxError("the sandbox is closed") from None
            self._start_call(self._cancel(number))
            raise

    def _start_call(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _cancel(self, number: str) -> None:
        if not self._is_open:
            return
        with contextlib.suppress(SandboxError, UsageError):
            await self._ask("POST", "/cancel", {"id": secrets.token_hex(16), "target": number}, patience_s=1.0)

    async def _ask(self, method: str, route: str, body: Any, *, patience_s: float | None = None) -> Any:
        patience = self._patience_s if patience_s is None else patience_s
        try:
            return await self._link.ask(method, self._route + route, body, patience_s=patience, answer_s=None)
        except EnvironmentFailure as failure:
            raise SandboxError(failure.what, got=failure.got, hint=failure.hint) from failure
        except ToolError as refused:
            raise SandboxFileError(str(refused)) from refused


class HttpProcess(PollingProcess):
    """Process in an `HttpSandbox`."""

    def __init__(self, sandbox: HttpSandbox, number: int) -> None:
        super().__init__()
        self._sandbox, self._number = sandbox, number

    async def _next_piece(self) -> bytes:
        return read_bytes((await self._sandbox.call("process_read", process=self._number))["data"])

    async def write(self, data: bytes) -> None:
        """See `SandboxProcess.write`."""
        answer = await self._sandbox.call("process_write", process=self._number, data=write_bytes(data))
        if answer["is_broken"]:
            raise BrokenPipeError("the program in the sandbox has closed its input")

    async def wait(self) -> ExecResult:
        """See `SandboxProcess.wait`."""
        return read_result(await self._sandbox.call("process_wait", process=self._number))

    async def interrupt(self) -> None:
        """See `SandboxProcess.interrupt`."""
        await self._sandbox.call("process_interrupt", process=self._number)

    async def kill(self) -> None:
        """See `SandboxProcess.kill`."""
        await self._sandbox.call("process_kill", process=self._number)


def _write_command(command: Command, **options: Unpack[CommandOptions]) -> dict[str, Any]:
    limits = options.get("limits")
    return {
        "command": command if isinstance(command, str) else list(command),
        "cwd": options.get("cwd"),
        "env": dict(options.get("env", {})),
        "limits": None if limits is None else limits.non_null,
    }
