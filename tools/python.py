"""A Python interpreter in the episode's sandbox, which keeps its variables from call to call."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from agentrl import ToolContext, ToolResult, tool
from agentrl.errors import UsageError
from agentrl.sandbox import ExecResult, Sandbox, SandboxProcess

DRIVER = Path(__file__).with_name("python_driver.py").read_text(encoding="utf-8")
SHARE = 0.8
"""Of the call's deadline: after that the code is interrupted."""
GRACE_S = 1.0
"""Seconds that interrupted code has to end; then its interpreter is killed."""
LONGEST_REPLY = 2**20
"""Bytes."""
RESTARTED = "The interpreter was started again: all variables and imports are lost; files are still there."


class _Gone(Exception):
    """The interpreter ended, or says what it should not."""


class _TooLong(_Gone):
    """It had to be killed."""


class Python:
    """The interpreter of one episode."""

    def __init__(self, *, sandbox: Sandbox, context: ToolContext) -> None:
        self._sandbox = sandbox
        self._seconds = SHARE * context.timeout_s
        self._process: SandboxProcess | None = None
        self._number = 0

    async def __aenter__(self) -> Python:
        """The interpreter starts with the first call."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the interpreter."""
        await self._end()

    async def __call__(self, code: str) -> ToolResult:
        """Runs Python code and shows what it prints and the value of its last line. Variables stay for later calls.

        Args:
            code: Python, one or more lines.
        """
        if self._process is None:
            self._process = await self._sandbox.spawn(["python3", "-u", "-c", DRIVER])
        self._number += 1
        try:
            reply = await self._run(self._process, code)
        except (_Gone, BrokenPipeError) as gone:
            return self._lost(gone, await self._end(grace_s=0.0 if isinstance(gone, _TooLong) else GRACE_S))
        except BaseException:  # cancelled while it runs: it cannot be asked again
            await self._end()
            raise
        text = str(reply["output"]) or "[no output]"
        return ToolResult(text, metrics={"raised": float(bool(reply["raised"]))})

    async def _run(self, process: SandboxProcess, code: str) -> dict[str, Any]:
        request = json.dumps({"id": self._number, "code": code}) + "\n"
        try:
            async with asyncio.timeout(self._seconds):
                await process.write(request.encode())
                return self._read(await process.read_line(longest=LONGEST_REPLY))
        except TimeoutError:
            await process.interrupt()
        try:
            async with asyncio.timeout(GRACE_S):
                reply = self._read(await process.read_line(longest=LONGEST_REPLY))
        except TimeoutError as late:
            raise _TooLong("interrupted, and goes on") from late
        note = f"[stopped after {self._seconds:g} s; variables are kept]"
        return {**reply, "output": f"{reply['output']}{note}", "raised": True}

    async def _end(self, *, grace_s: float = 0.0) -> ExecResult | None:
        """End the interpreter; one that is ending by itself gets some seconds, so that its own exit code is told."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
        await process.kill()
        return await process.wait()

    def _lost(self, gone: Exception, ended: ExecResult | None) -> ToolResult:
        """What the policy reads when its interpreter is gone; the next call starts another."""
        exit_code = 0 if ended is None else ended.exit_code
        if self._number == 1 and exit_code in (126, 127):
            raise UsageError("the sandbox has no python3", got=f"exit code {exit_code}", hint="use another image")
        reason = f"The interpreter ended with exit code {exit_code}."
        if ended is not None and ended.out_of_memory:
            reason = "The code used too much memory."
        elif isinstance(gone, _TooLong):
            reason = f"The code ran for more than {self._seconds:g} s and did not stop."
        return ToolResult(f"{reason} {RESTARTED}", metrics={"raised": 1.0, "restarts": 1.0})

    def _read(self, line: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(line)
            if reply["id"] == self._number and {"output", "raised"} <= reply.keys():
                return dict(reply)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _Gone("it ended") from error
        raise _Gone("it answered something else")


python = tool(name="python")(Python)
