"""A program that goes on running in a local sandbox."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from agentrl.sandbox.channel import Answer, Channel
from agentrl.sandbox.contract import SandboxProcess
from agentrl.sandbox.limits import ExecResult


class LocalProcess(SandboxProcess):
    """See `SandboxProcess`.

    Args:
        channel: To the supervisor.
        number: Of the request that started it.
        ended: That request's answer, which comes at the program's end.
        result: Makes a result of that answer.
    """

    def __init__(
        self,
        channel: Channel,
        number: int,
        ended: asyncio.Task[Answer],
        result: Callable[[Answer], ExecResult],
    ) -> None:
        self._channel, self._number, self._ended, self._make_result = channel, number, ended, result
        self._ended.add_done_callback(_seen)
        self._pull: asyncio.Task[Answer] | None = None
        self._pulled = bytearray()
        self._result: ExecResult | None = None

    async def write(self, data: bytes) -> None:
        """See `SandboxProcess.write`."""
        answer = await self._channel.ask("push", body=data, target=self._number)
        if answer.code != 0:
            raise BrokenPipeError(answer.code, "the program in the sandbox reads no more")

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
        """Add the next piece to what was pulled; whether there was one. What a cancelled one brings is kept."""
        if self._pull is None:
            self._pull = asyncio.create_task(self._channel.ask("pull", target=self._number))
            self._pull.add_done_callback(_seen)
        answer = await asyncio.shield(self._pull)
        self._pull = None
        self._pulled += answer.out
        return bool(answer.out)

    async def wait(self) -> ExecResult:
        """See `SandboxProcess.wait`."""
        answer = await asyncio.shield(self._ended)
        if self._result is None:
            self._result = self._make_result(answer)
        return self._result

    async def interrupt(self) -> None:
        """See `SandboxProcess.interrupt`."""
        await self._channel.ask("signal", target=self._number, signal=int(signal.SIGINT))

    async def kill(self) -> None:
        """See `SandboxProcess.kill`."""
        await self._channel.ask("signal", target=self._number, signal=int(signal.SIGKILL))
        await self.wait()
        self._channel.tell("release", target=self._number)


def _seen(task: asyncio.Task[Answer]) -> None:
    """Who waits gets the error; where nobody does, nothing is to be said."""
    if not task.cancelled():
        task.exception()
