"""Channel to a supervisor (`agentrl.sandbox.supervisor`): numbered requests, whose answers arrive in any order.

It also lets this process serve ports of the sandbox's loopback interface: this is the host's end of
`agentrl.sandbox.supervisor_ports`.

program ──TCP on 127.0.0.1, inside──► supervisor ══its channel══► `Ports` ──socket pair──► protocol, in this process

Forwarding needs no network in the sandbox: all data passes through the channel, which commands cannot access. It works
with any supervisor, even behind a daemon on another machine.
"""

from __future__ import annotations

import asyncio
import itertools
import marshal
import os
import select
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox.contract import ProtocolFactory
from agentrl.sandbox.spec import ExecResult
from agentrl.sandbox.supervisor import ANSWER, BROKEN, OUT_OF_MEMORY, REQUEST, TIMED_OUT, TRUNCATED
from agentrl.sandbox.supervisor_ports import PIECE

READY = 0
"""Request number of the message with which the supervisor reports that it is ready."""
MAX_PAYLOAD = 2**30
MAX_CONNECTIONS = 128
"""Maximum concurrent connections of one port; others wait in the sandbox."""
RETRY_S = 0.05
SUPERVISOR_START_S = 60.0
"""Timeout in seconds for the start of the supervisor."""
SUPERVISOR_ANSWER_S = 15.0
"""Timeout in seconds for requests that do not wait for a program."""


ReadExactly: TypeAlias = Callable[[int], Awaitable[bytes]]
"""Function that reads exactly N bytes of the answers; raises `asyncio.IncompleteReadError` at the end of the stream."""


class Channel:
    """Host's end of the channel."""

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
        """Send the opening message and wait until the supervisor is ready.

        `opening` comes from `agentrl.sandbox.supervised`, and is empty if it was already sent. `unwrap` extracts the
        answers from the received stream, for transports that wrap them.

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

    async def ask(
        self,
        method: str,
        *,
        body: bytes = b"",
        number: int | None = None,
        deadline_s: float | None = None,
        **header: Any,
    ) -> ExecResult:
        """Send a request and wait for its answer, in the form of a command's result.

        Raises:
            SandboxError: the sandbox is gone, failed to serve the request, or missed the deadline (default: none).
        """
        number = self.next_number() if number is None else number
        answer = self._expect(number)
        try:
            async with asyncio.timeout(deadline_s):
                try:
                    await self._write({"method": method, "number": number, **header}, body).drain()
                except ConnectionError:
                    self._lose(SandboxError("the sandbox is gone", got=self._why_lost()))
                return await answer
        except TimeoutError as late:
            waited = f"no answer to the request {method} in {deadline_s} s"
            raise SandboxError("the sandbox does not answer", got=waited) from late
        finally:
            self._waiting.pop(number, None)

    def notify(self, method: str, **header: Any) -> None:
        """Send a request without waiting for its answer; does nothing once the sandbox is gone."""
        if self._loss is None and self._writer is not None:
            self._write({"method": method, "number": self.next_number(), **header}, b"")

    def hang_up(self) -> None:
        """Fail all pending and later calls with `SandboxError`."""
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
        if max(out, err) > MAX_PAYLOAD:
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


class Ports:
    """Forwarded ports of one sandbox."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._accepting: set[asyncio.Task[None]] = set()
        self._carrying: set[asyncio.Task[None]] = set()

    async def open(self, protocol: ProtocolFactory, port: int) -> int:
        """Listen on a port of the sandbox's 127.0.0.1, 0 for a free one, and return the port.

        Raises:
            UsageError: the port is in use.
            SandboxError: the sandbox is gone.
        """
        answer = await self._channel.ask("listen", deadline_s=SUPERVISOR_ANSWER_S, port=port)
        if answer.exit_code < 0:
            raise UsageError(f"a sandbox cannot listen on its port {port}", got=os.strerror(-answer.exit_code))
        self._accepting.add(asyncio.create_task(self._accept(answer.exit_code, protocol)))
        return answer.exit_code

    async def close(self) -> None:
        """End all connections. Idempotent."""
        for tasks in (self._accepting, self._carrying):
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _accept(self, port: int, protocol: ProtocolFactory) -> None:
        room = asyncio.Semaphore(MAX_CONNECTIONS)
        with suppress(SandboxError):
            while True:
                await room.acquire()
                connection = (await self._channel.ask("accept", target=port)).exit_code
                if connection == 0:
                    room.release()
                    await asyncio.sleep(RETRY_S)
                    continue
                carrying = asyncio.create_task(self._carry(connection, protocol))
                self._carrying.add(carrying)
                carrying.add_done_callback(self._carrying.discard)
                carrying.add_done_callback(lambda _: room.release())

    async def _carry(self, connection: int, protocol: ProtocolFactory) -> None:
        """Copy a connection's data between the sandbox and a protocol until both sides have closed it."""
        ours, theirs = socket.socketpair()
        transport: asyncio.BaseTransport | None = None
        try:
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_accepted_socket(protocol, theirs)
            async with asyncio.TaskGroup() as group:
                inwards = group.create_task(self._receive(connection, ours))
                group.create_task(self._send(connection, ours, inwards))
        except* (SandboxError, OSError):
            pass
        finally:
            ours.close()
            if transport is None:
                theirs.close()
            elif isinstance(transport, asyncio.Transport) and not transport.is_closing():
                transport.abort()
            self._channel.notify("drop", target=connection)

    async def _receive(self, connection: int, ours: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            answer = await self._channel.ask("receive", target=connection)
            if answer.exit_code:
                raise ConnectionResetError(answer.exit_code, "the program's connection broke")
            if not answer.stdout:
                ours.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(ours, answer.stdout)

    async def _send(self, connection: int, ours: socket.socket, inwards: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(ours, PIECE):
            answer = await self._channel.ask("send", body=data, target=connection)
            if answer.exit_code:
                raise ConnectionResetError(answer.exit_code, "the program's connection broke")
        self._channel.notify("shut", target=connection)
        if _is_hung_up(ours):
            inwards.cancel()  # the protocol does not read further data


def _is_hung_up(end: socket.socket) -> bool:
    """Return True if the other end is closed for both reading and writing."""
    watch = select.poll()
    watch.register(end, 0)
    return any(events & select.POLLHUP for _, events in watch.poll(0))
