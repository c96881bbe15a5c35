"""A Python interpreter in a sandbox that remembers from one piece of code to the next."""

from __future__ import annotations

from agentrl.sandbox import Limits

from .acting import ActingSandbox, cut
from .pipes import Deadline, Ended, Late, Pipe

MOST_SHOWN = 4000


class Interpreter:
    """Begins when it is first used, and anew after its end.

    Args:
        acting: The sandbox, into which the programs of `inside` are sent.
        seconds: For each piece of code.
        memory: Bytes.
    """

    def __init__(self, acting: ActingSandbox, *, seconds: float, memory: int = 512 * 2**20) -> None:
        self._acting = acting
        self._seconds = seconds
        self._limits = Limits(memory_bytes=memory)
        self._pipe: Pipe | None = None

    async def run(self, code: str) -> str:
        """What the code prints, for the policy.

        Raises:
            SandboxError: the sandbox failed.
        """
        sandbox = await self._acting.get()
        if self._pipe is None:
            self._pipe = await Pipe(sandbox, "interpreter", self._limits).__aenter__()
        try:
            async with Deadline(sandbox, self._seconds):
                await self._pipe.tell({"code": code})
                printed = str((await self._pipe.hear()).get("printed", ""))
        except Late:
            await self.close()
            return f"[stopped after {self._seconds:g} seconds; the interpreter begins anew]"
        except Ended:
            await self.close()
            return "[the interpreter ended, and begins anew]"
        return cut(printed.rstrip(), MOST_SHOWN) or "[no output]"

    def forget(self) -> None:
        """Drop an interpreter whose sandbox is gone."""
        self._pipe = None

    async def close(self) -> None:
        """End it."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            await pipe.__aexit__(None, None, None)
