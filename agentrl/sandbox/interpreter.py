"""Stateful Python interpreter in a sandbox: variables persist from one piece of code to the next."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import SandboxError, UsageError
from agentrl.errors.deadlines import async_boundary
from agentrl.sandbox.contract import Sandbox, SandboxProcess
from agentrl.sandbox.spec import ExecResult, Limits

SIGN_OF_LIFE_S = 3.0
"""Timeout in seconds of a trivial command, after which the sandbox counts as lost or its machine as overloaded."""
PROGRAM = Path(__file__).with_name("interpreter_main.py").read_text(encoding="utf-8")
INTERPRETER_START_S = 20.0
INTERPRETER_STOP_S = 5.0
MAX_REPLY_BYTES = 2**20
"""Maximum bytes of a reply."""
NOT_FOUND = 127


async def require_life(sandbox: Sandbox) -> None:
    """Check that a sandbox responds quickly, so that a hanging or ended program is the code's fault.

    Raises:
        SandboxError: the sandbox does not answer in time, so the program may have hung because of the machine.
    """
    try:
        async with asyncio.timeout(SIGN_OF_LIFE_S):
            result = await sandbox.exec(["true"])
    except TimeoutError as error:
        raise SandboxError("a sandbox hangs", got=f"no answer in {SIGN_OF_LIFE_S:g} s") from error
    if not result.is_success:
        raise SandboxError("a sandbox cannot run anything", got=f"exit code {result.exit_code} of true")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionResult:
    """Outcome of a piece of code."""

    output: str = ""
    """Output of the code, and the value of its last line."""
    raised: bool = False
    """True if the code raised an exception or was interrupted."""
    lost: str = ""
    """Reason why the interpreter and its variables were lost, as a sentence; the next piece of code starts a new one.
    Empty if the interpreter still runs."""


class _Gone(Exception):
    """The interpreter cannot be used again; the message gives the reason."""


class _Closed(_Gone):
    """The interpreter closed its output: it is about to end, or has ended."""


class Interpreter:
    """Interpreter that starts with the first piece of code, and again after a loss. It runs one piece at a time.

    A piece of code is interrupted after `seconds`, as by Ctrl-C, and has `grace_s` to end before the interpreter is
    killed.
    """

    def __init__(self, sandbox: Sandbox, *, seconds: float, grace_s: float, limits: Limits | None = None) -> None:
        self._sandbox = sandbox
        self._seconds, self._grace_s = seconds, grace_s
        self._limits = limits
        self._process: SandboxProcess | None = None
        self._number = 0

    async def run(self, code: str) -> ExecutionResult:
        """Run a piece of code. Exceptions that it raises are part of the result.

        Raises:
            SandboxError: the sandbox failed, independently of the code.
            UsageError: the sandbox has no Python.
        """
        process = self._process or await self._start()
        self._number += 1
        try:
            return await self._ask(process, code)
        except _Gone as gone:
            ended = await self._end(grace_s=self._grace_s if isinstance(gone, _Closed) else 0.0)
            await require_life(self._sandbox)
            why = gone if ended is None else _describe_end(ended)
            return ExecutionResult(raised=True, lost=str(why))
        except BaseException:  # cancelled, or the sandbox is gone: the interpreter cannot be used again
            with contextlib.suppress(SandboxError):
                await self._end()
            raise

    async def close(self) -> None:
        """End the interpreter."""
        await self._end()

    async def _start(self) -> SandboxProcess:
        async with async_boundary(SandboxError, "starting Python in a sandbox", deadline_s=INTERPRETER_START_S):
            process = await self._sandbox.spawn(["python3", "-u", "-c", PROGRAM], limits=self._limits)
            if (await process.read_line()).endswith(b"\n"):
                self._process, self._number = process, 0
                return process
            ended = await process.wait()
        errors = ended.stderr.decode(errors="replace")[-300:].strip()
        if ended.exit_code == NOT_FOUND:
            raise UsageError("the sandbox has no python3", got=errors, hint="use another image")
        raise SandboxError("Python does not start in a sandbox", got=f"exit code {ended.exit_code} {errors}")

    async def _ask(self, process: SandboxProcess, code: str) -> ExecutionResult:
        request = json.dumps({"id": self._number, "code": code}) + "\n"
        try:
            async with asyncio.timeout(self._seconds):
                await process.write(request.encode())
                return await self._reply(process)
        except BrokenPipeError as broken:
            raise _Closed("The interpreter closed its input.") from broken
        except TimeoutError:
            await process.interrupt()
        try:
            async with asyncio.timeout(self._grace_s):
                reply = await self._reply(process)
        except TimeoutError as late:
            raise _Gone(f"The code ran for more than {self._seconds:g} s and did not stop.") from late
        note = f"[stopped after {self._seconds:g} s; variables are kept]"
        return ExecutionResult(output=f"{reply.output}{note}", raised=True)

    async def _reply(self, process: SandboxProcess) -> ExecutionResult:
        line = await process.read_line(longest=MAX_REPLY_BYTES)
        if not line.endswith(b"\n") and len(line) < MAX_REPLY_BYTES:
            raise _Closed("The interpreter closed its output.")
        reply = _read(line)
        if reply.get("id") != self._number or not isinstance(reply.get("output"), str):
            raise _Gone("The interpreter sent an invalid reply.")
        return ExecutionResult(output=reply["output"], raised=bool(reply.get("raised")))

    async def _end(self, *, grace_s: float = 0.0) -> ExecResult | None:
        """End the interpreter; return its result if it ended on its own within `grace_s`."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            async with asyncio.timeout(grace_s):
                return await process.wait()
        except TimeoutError:
            return None
        finally:
            async with async_boundary(SandboxError, "stopping Python in a sandbox", deadline_s=INTERPRETER_STOP_S):
                await process.kill()


def _read(line: bytes) -> dict[str, Any]:
    """Parse a reply; empty if it is not valid."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(reply := json.loads(line), dict):
            return reply
    return {}


def _describe_end(ended: ExecResult) -> str:
    if ended.out_of_memory:
        return "The code used too much memory."
    return f"The interpreter ended with exit code {ended.exit_code}."
