"""A program that goes on running in a sandbox with a supervisor."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from agentrl.sandbox.channel import Answer, Channel
from agentrl.sandbox.limits import ExecResult
from agentrl.sandbox.pulled_process import PulledProcess, seen


class SpokenProcess(PulledProcess):
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
        super().__init__()
        self._channel, self._number, self._ended, self._make_result = channel, number, ended, result
        self._ended.add_done_callback(seen)
        self._result: ExecResult | None = None

    async def write(self, data: bytes) -> None:
        """See `SandboxProcess.write`."""
        answer = await self._channel.ask("push", body=data, target=self._number)
        if answer.code != 0:
            raise BrokenPipeError(answer.code, "the program in the sandbox reads no more")

    async def _next_piece(self) -> bytes:
        return (await self._channel.ask("pull", target=self._number)).out

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
