"""Ports of a sandbox's loopback that this process serves: the host's end of `agentrl.sandbox.supervisor_ports`.

program ──TCP on 127.0.0.1, inside──► supervisor ══its channel══► `Ports` ──socket pair──► protocol, in this process

The sandbox needs no network for it. The only way out is the supervisor's channel, which commands cannot access. It
works with any supervisor, even with a daemon on another machine.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from contextlib import suppress

from agentrl.errors import SandboxError, UsageError
from agentrl.sandbox.channel import Channel
from agentrl.sandbox.contract import ProtocolFactory
from agentrl.sandbox.supervisor_ports import PIECE

MOST_CONNECTIONS = 128
"""Maximum concurrent connections of one port; others wait in the sandbox."""
RETRY_S = 0.05


class Ports:
    """Forwarded ports of one sandbox.

    Args:
        channel: Channel to the supervisor.
    """

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
        answer = await self._channel.ask("listen", port=port)
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
        room = asyncio.Semaphore(MOST_CONNECTIONS)
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
        """Carry a connection's data between the sandbox and a protocol, until both sides have ended."""
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
