"""The socket to a supervisor (`agentrl.sandbox.supervisor`): numbered requests, answers in any order."""

from __future__ import annotations

import asyncio
import itertools
import marshal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.errors import SandboxError
from agentrl.sandbox.supervisor import ANSWER, BROKEN, OUT_OF_MEMORY, REQUEST, TIMED_OUT, TRUNCATED

READY = 0
"""The number under which the supervisor says that it is ready."""
LARGEST_PAYLOAD = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorReply:
    """Answer of the supervisor."""

    flags: int
    code: int
    seconds: float
    out: bytes
    err: bytes

    @property
    def timed_out(self) -> bool:
        """The command was killed at its deadline."""
        return bool(self.flags & TIMED_OUT)

    @property
    def truncated(self) -> bool:
        """Output was dropped."""
        return bool(self.flags & TRUNCATED)

    @property
    def out_of_memory(self) -> bool:
        """The supervisor saw a process killed for want of memory."""
        return bool(self.flags & OUT_OF_MEMORY)


class Reader(Protocol):
    """Source of the supervisor's answers."""

    async def readexactly(self, size: int, /) -> bytes:
        """The next bytes.

        Raises:
            asyncio.IncompleteReadError: it ended before.
        """


class Channel:
    """The host's end.

    Args:
        why_lost: Called when the other end is gone; says why.
    """

    def __init__(self, why_lost: Callable[[], str]) -> None:
        self._why_lost = why_lost
        self._numbers = itertools.count(READY + 1)
        self._waiting: dict[int, asyncio.Future[SupervisorReply]] = {}
        self._loss: SandboxError | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(
        self,
        end: socket.socket,
        opening: bytes,
        *,
        deadline_s: float,
        unwrap: Callable[[asyncio.StreamReader], Reader] = lambda reader: reader,
    ) -> None:
        """Send the opening and wait until the supervisor is ready.

        Args:
            end: The host's end of the socket.
            opening: As `agentrl.sandbox.supervised` makes it; empty when it was sent already.
            deadline_s: Seconds to get ready in.
            unwrap: Takes what comes out of the wrapping in which something between here and there puts it.

        Raises:
            SandboxError: it did not get ready.
        """
        reader, self._writer = await asyncio.open_connection(sock=end, limit=2**20)
        ready = self._expect(READY)
        self._reading = asyncio.create_task(self._read(unwrap(reader)))
        self._writer.write(opening)
        try:
            async with asyncio.timeout(deadline_s):
                await ready
        except TimeoutError:
            raise SandboxError("a sandbox did not start in time", got=f"nothing in {deadline_s:g} s") from None

    def next_number(self) -> int:
        """A number for a request."""
        return next(self._numbers)

    async def ask(self, method: str, *, body: bytes = b"", number: int | None = None, **header: Any) -> SupervisorReply:
        """Send a request and wait for its answer.

        Raises:
            SandboxError: the sandbox is gone, or could not do it.
        """
        number = self.next_number() if number is None else number
        answer = self._expect(number)
        await self._send({"method": method, "number": number, **header}, body)
        try:
            received = await answer
        finally:
            self._waiting.pop(number, None)
        if received.flags & BROKEN:
            raise SandboxError("a sandbox cannot start a process", got=received.err.decode(errors="replace"))
        return received

    def tell(self, method: str, **header: Any) -> None:
        """Send a request whose answer nobody awaits; nothing when the sandbox is gone."""
        if self._loss is None and self._writer is not None:
            self._write({"method": method, "number": self.next_number(), **header}, b"")

    def hang_up(self) -> None:
        """Whoever waits, or asks for more, gets a `SandboxError`."""
        self._lose(SandboxError("the sandbox is closed"))

    async def close(self) -> None:
        """Close the socket. Idempotent."""
        self.hang_up()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self._writer is not None:
            self._writer.close()

    def _expect(self, number: int) -> asyncio.Future[SupervisorReply]:
        if self._loss is not None:
            raise self._loss
        self._waiting[number] = asyncio.get_running_loop().create_future()
        return self._waiting[number]

    def _write(self, header: dict[str, Any], body: bytes) -> None:
        assert self._writer is not None
        told = marshal.dumps(header)
        self._writer.write(REQUEST.pack(len(told), len(body)) + told + body)

    async def _send(self, header: dict[str, Any], body: bytes) -> None:
        assert self._writer is not None
        self._write(header, body)
        try:
            await self._writer.drain()
        except ConnectionError:
            self._lose(SandboxError("the sandbox is gone", got=self._why_lost()))

    async def _read(self, reader: Reader) -> None:
        try:
            while True:
                number, answer = await _next_answer(reader)
                waiting = self._waiting.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._lose(SandboxError("the sandbox is gone", got=self._why_lost()))
        except SandboxError as broken:
            self._lose(broken)

    def _lose(self, loss: SandboxError) -> None:
        if self._loss is None:
            self._loss = loss
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._loss)
                waiting.exception()  # seen: who waited may have been cancelled
        self._waiting.clear()


async def _next_answer(reader: Reader) -> tuple[int, SupervisorReply]:
    number, flags, code, seconds, out, err = ANSWER.unpack(await reader.readexactly(ANSWER.size))
    if max(out, err) > LARGEST_PAYLOAD:
        raise SandboxError("a sandbox sends nonsense", got=f"a payload of {max(out, err)} bytes")
    answer = SupervisorReply(
        flags=flags, code=code, seconds=seconds, out=await reader.readexactly(out), err=await reader.readexactly(err)
    )
    return number, answer
