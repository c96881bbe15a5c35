"""A program whose output comes piece by piece, when it is asked for; lines are cut from it here."""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from agentrl.sandbox.contract import SandboxProcess


class PulledProcess(SandboxProcess):
    """What back ends with a request for the next piece have in common. What a cancelled reader asked for is kept."""

    def __init__(self) -> None:
        self._pull: asyncio.Task[bytes] | None = None
        self._pulled = bytearray()

    @abstractmethod
    async def _next_piece(self) -> bytes:
        """The next piece of its output; empty at the end.

        Raises:
            SandboxError: the sandbox is gone.
        """

    async def read(self) -> bytes:
        """See `SandboxProcess.read`."""
        if not self._pulled:
            await self._more()
        piece = bytes(self._pulled)
        self._pulled.clear()
        return piece

    async def read_line(self, *, longest: int = 2**20) -> bytes:
        """See `SandboxProcess.read_line`."""
        searched = 0
        while True:
            end = self._pulled.find(b"\n", searched, longest)
            if end >= 0 or len(self._pulled) >= longest:
                break
            searched = len(self._pulled)
            if not await self._more():
                break
        size = end + 1 if end >= 0 else min(len(self._pulled), longest)
        line = bytes(self._pulled[:size])
        del self._pulled[:size]
        return line

    async def _more(self) -> bool:
        """Add the next piece to what was pulled; whether there was one."""
        if self._pull is None:
            self._pull = asyncio.create_task(self._next_piece())
            self._pull.add_done_callback(seen)
        pull = self._pull
        try:
            piece = await asyncio.shield(pull)
        finally:
            if pull.done():
                self._pull = None
        self._pulled += piece
        return bool(piece)


def seen(task: asyncio.Task[object]) -> None:
    """Who waits gets the error; where nobody does, nothing is to be said."""
    if not task.cancelled():
        task.exception()
