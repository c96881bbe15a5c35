"""All sessions of a server: how many there may be, and how long an abandoned one stays."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from agentrl.env_server.refusal import Refusal
from agentrl.env_server.session import Clock, Session
from agentrl.remote.wire import Problem
from agentrl.rollout.environments import EnvironmentHost


class Sessions:
    """Opens, finds and closes sessions.

    Args:
        host: Lends environments; as many as there may be sessions.
        most: Most sessions at once.
        lease_s: Seconds without a request after which a session is closed.
        tool_timeout_s: Deadline of a call of an environment's tool.
        clock: Seconds.
    """

    def __init__(
        self, host: EnvironmentHost, *, most: int, lease_s: float, tool_timeout_s: float, clock: Clock
    ) -> None:
        self._host = host
        self._most = most
        self._lease_s = lease_s
        self._tool_timeout_s = tool_timeout_s
        self._clock = clock
        self._sessions: dict[str, asyncio.Task[Session]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    async def open(self, name: str) -> None:
        """Open a session, unless there is one of this name already.

        Raises:
            Refusal: there is no room.
            EnvironmentFailure: the environment cannot be made.
        """
        if name not in self._sessions:
            if len(self._sessions) >= self._most:
                raise Refusal(Problem.BUSY, f"all {self._most} sessions are taken")
            self._sessions[name] = asyncio.create_task(self._begin(name))
        opening = self._sessions[name]
        try:
            await asyncio.shield(opening)
        except Exception:
            if self._sessions.get(name) is opening:
                del self._sessions[name]
            raise

    def find(self, name: str) -> Session:
        """An open session.

        Raises:
            Refusal: there is none of this name.
        """
        opened = self._sessions.get(name)
        if opened is None or not _is_open(opened):
            hint = f"it was closed, or nobody asked it for {self._lease_s:g} s, or the server was started again"
            raise Refusal(Problem.SESSION, f"there is no session {name}: {hint}")
        return opened.result()

    def end(self, name: str) -> None:
        """Close a session soon; one that is not there is closed already."""
        opened = self._sessions.pop(name, None)
        if opened is not None:
            closing = asyncio.create_task(_close(opened))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def expire(self) -> None:
        """Close the sessions whose lease is over."""
        for name, opened in list(self._sessions.items()):
            if _is_open(opened) and opened.result().idle_s > self._lease_s:
                self.end(name)

    async def close(self) -> None:
        """Close all sessions."""
        for name in list(self._sessions):
            self.end(name)
        while self._closing:
            await asyncio.wait(set(self._closing))

    async def _begin(self, name: str) -> Session:
        stack = AsyncExitStack()
        environment = await stack.enter_async_context(self._host.borrow(f"session {name[:8]}"))
        return Session(environment, stack, tool_timeout_s=self._tool_timeout_s, clock=self._clock)


def _is_open(opened: asyncio.Task[Session]) -> bool:
    """Whether a session is there, and neither still being opened nor could not be."""
    return opened.done() and not opened.cancelled() and opened.exception() is None


async def _close(opened: asyncio.Task[Session]) -> None:
    if not opened.done():
        await asyncio.wait({opened})
    if _is_open(opened):
        await opened.result().close()
