"""Channel to a supervisor (`agentrl.sandbox.supervisor`): numbered requests, answers in any order."""

from __future__ import annotations

import asyncio
import itertools
import marshal
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from agentrl.errors import SandboxError
from agentrl.sandbox.spec import ExecResult
from agentrl.sandbox.supervisor import ANSWER, BROKEN, OUT_OF_MEMORY, REQUEST, TIMED_OUT, TRUNCATED

READY = 0
"""Number of the answer with which the supervisor reports that it is ready."""
LARGEST_PAYLOAD = 2**30


ReadExactly: TypeAlias = Callable[[int], Awaitable[bytes]]
"""Function that reads a number of bytes of the answers; raises `asyncio.IncompleteReadError` at their end."""


class Channel:
    """Host's end of the channel.

    Args:
        why_lost: Returns the reason when the other end is lost.
    """

    def __init__(self, why_lost: Callable[[], str]) -> None:
        self._why_lost = why_lost
        self._numbers = itertools.count(READY + 1)
        self._waiting: dict[int, asyncio.Future[ExecResult]] = {}
        self._loss: SandboxError | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(
        self,
        end: socket.socket,
        opening: bytes,
        *,
        deadline_s: float,
        unwrap: Callable[[asyncio.StreamReader], ReadExactly] = lambda stream: stream.readexactly,
    ) -> None:
        """Send the opening and wait until the supervisor is ready.

        Args:
            end: Host's end of the socket.
            opening: Opening from `agentrl.sandbox.supervised`; empty if it was already sent.
            deadline_s: Seconds before the supervisor must be ready.
            unwrap: Extracts the answers from the received stream, for transports that wrap them.

        Raises:
            SandboxError: the supervisor is not ready in time.
        """
        reader, self._writer = await asyncio.open_connection(sock=end, limit=2**20)
        ready = self._expect(READY)
        self._reading = asyncio.create_task(self._read(unwrap(reader)))
        self._writer.write(opening)
        try:
            async with asyncio.timeout(deadline_s):
                await ready
        except TimeoutError:
            raise SandboxError("a sandbox did not start in time", got=f"no answer in {deadline_s:g} s") from None

    def next_number(self) -> int:
        """Return the number of the next request."""
        return next(self._numbers)

    async def ask(self, method: str, *, body: bytes = b"", number: int | None = None, **header: Any) -> ExecResult:
        """Send a request and wait for its answer, in the form of a command's result.

        Raises:
            SandboxError: the sandbox is gone, or failed to serve the request.
        """
        number = self.next_number() if number is None else number
        answer = self._expect(number)
        try:
            await self._write({"method": method, "number": number, **header}, body).drain()
        except ConnectionError:
            self._lose(SandboxError("the sandbox is gone", got=self._why_lost()))
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def notify(self, method: str, **header: Any) -> None:
        """Send a request without waiting for its answer; does nothing once the sandbox is gone."""
        if self._loss is None and self._writer is not None:
            self._write({"method": method, "number": self.next_number(), **header}, b"")

    def hang_up(self) -> None:
        """Make all waiting and later calls raise `SandboxError`."""
        self._lose(SandboxError("the sandbox is closed"))

    async def close(self) -> None:
        """Close the socket. Idempotent."""
        self.hang_up()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self._writer is not None:
            self._writer.close()

    def _expect(self, number: int) -> asyncio.Future[ExecResult]:
        if self._loss is not None:
            raise self._loss
        self._waiting[number] = asyncio.get_running_loop().create_future()
        return self._waiting[number]

    def _write(self, header: dict[str, Any], body: bytes) -> asyncio.StreamWriter:
        assert self._writer is not None
        head = marshal.dumps(header)
        self._writer.write(REQUEST.pack(len(head), len(body)) + head + body)
        return self._writer

    async def _read(self, read: ReadExactly) -> None:
        try:
            while True:
                await self._read_answer(read)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._lose(SandboxError("the sandbox is gone", got=self._why_lost()))
        except SandboxError as broken:
            self._lose(broken)

    async def _read_answer(self, read: ReadExactly) -> None:
        number, flags, code, seconds, out, err = ANSWER.unpack(await read(ANSWER.size))
        if max(out, err) > LARGEST_PAYLOAD:
            raise SandboxError("a sandbox sent an invalid answer", got=f"a payload of {max(out, err)} bytes")
        result = ExecResult(
            exit_code=code,
            stdout=await read(out),
            stderr=await read(err),
            timed_out=bool(flags & TIMED_OUT),
            truncated=bool(flags & TRUNCATED),
            out_of_memory=bool(flags & OUT_OF_MEMORY),
            seconds=seconds,
        )
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            return
        if flags & BROKEN:
            complaint = result.stderr.decode(errors="replace")
            waiting.set_exception(SandboxError("a sandbox cannot start a process", got=complaint))
        else:
            waiting.set_result(result)

    def _lose(self, loss: SandboxError) -> None:
        if self._loss is None:
            self._loss = loss
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._loss)
                waiting.exception()  # marks it as retrieved: its caller may have been cancelled
        self._waiting.clear()
