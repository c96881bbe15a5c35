"""A Python interpreter in the episode's sandbox that keeps its variables between calls."""

from __future__ import annotations

from types import TracebackType

from agentrl import ToolContext, ToolResult, tool
from agentrl.sandbox import Sandbox
from agentrl.sandbox.interpreter import Interpreter

SHARE = 0.8
"""Fraction of the call's time limit after which the code is interrupted."""
GRACE_SHARE = 0.1
"""Fraction of the call's time limit that interrupted code has to end."""
RESTARTED = "The interpreter was started again: all variables and imports are lost; files are still there."


class Python:
    """The interpreter of one episode."""

    def __init__(self, *, sandbox: Sandbox, context: ToolContext) -> None:
        seconds = context.timeout_s
        self._interpreter = Interpreter(sandbox, seconds=SHARE * seconds, grace_s=GRACE_SHARE * seconds)

    async def __aenter__(self) -> Python:
        """Return the tool; the interpreter starts with the first call."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the interpreter."""
        await self._interpreter.close()

    async def __call__(self, code: str) -> ToolResult:
        """Runs Python code and shows what it prints and the value of its last line. Variables stay for later calls.

        Args:
            code: Python, one or more lines.
        """
        ran = await self._interpreter.run(code)
        if ran.lost:
            return ToolResult(f"{ran.lost} {RESTARTED}", metrics={"raised": 1.0, "restarts": 1.0})
        return ToolResult(ran.output or "[no output]", metrics={"raised": float(ran.raised)})


python = tool(name="python")(Python)
