"""Watches the servers of a pool, and brings lost ones back.

    SERVING ── a connection broke ──► SUSPECT ── it answers the check ──► SERVING
       │                                 │ it does not
       └── no answer, stale, refuses ────┴──► LOST ── back, with the current weights, verified ──► SERVING
           weights                              └── could not be brought back some times in a row ──► REMOVED

One task per server. A server never serves between its loss and the moment at which it has the current weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.engine import InferenceServer
from agentrl.errors import AgentRLError, EngineError, TrainingError, async_boundary
from agentrl.serving.pool.member import Member, MemberState, PoolSettings

BUSY_LOOP_S = 0.1
"""A deadline that fires so late was missed by this process, which did not look: the server is asked again."""
MOST_QUESTIONS = 3

_log = logging.getLogger(__name__)


class Restart(Protocol):
    """Starts a launched server again."""

    async def __call__(self, index: int) -> InferenceServer:
        """End what is left of the server at this place, start another, and give it connected.

        Raises:
            EngineError: it does not start.
        """


@dataclass(slots=True, kw_only=True)
class Keeper:
    """Interface of a pool for watching its servers and bringing them back."""

    settings: PoolSettings
    restart: Restart | None
    changing: asyncio.Lock
    """Held while weights or members change."""
    version: Callable[[], int]
    is_paused: Callable[[], bool]
    on_change: Callable[[], None]
    """A server came, went, or may take more or fewer requests."""
    on_failure: Callable[[TrainingError], None]
    """Training must stop."""
    say: Callable[[str], None]
    """Is told of losses and returns."""
    bring_up_to_date: Callable[[InferenceServer], Awaitable[object]] | None = None
    """Gives a server the current weights and verifies them."""
    changes_running: int = field(default=0)
    """Changes of weights that run: servers may be too busy to answer, and their own deadline watches them."""

    async def tend(self, member: Member) -> None:
        """The life of one member, until it is given up or the task is cancelled."""
        while member.state is not MemberState.REMOVED:
            await self._watch(member)
            await self._bring_back(member)

    def lose(self, member: Member, why: object) -> None:
        """A server is lost: its requests go elsewhere."""
        if member.state.is_in:
            self.say(f"server {member.server.url} is lost: {why}")
            member.lose(str(why))
            self.on_change()

    def suspect(self, member: Member) -> None:
        """A connection broke: send nothing new before the server has answered a check, which comes at once."""
        if member.state is MemberState.SERVING:
            member.state = MemberState.SUSPECT
            member.wake.set()
            self.on_change()

    async def _watch(self, member: Member) -> None:
        while member.state.is_in:
            await self._check(member)
            self.on_change()
            if member.state.is_in:
                await self._sleep(member, self.settings.check_every_s)

    async def _sleep(self, member: Member, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await member.wake.wait()
        except TimeoutError:
            pass
        member.wake.clear()

    async def _check(self, member: Member) -> None:
        ailment = await self._ailment(member.server)
        if self.changes_running or not member.state.is_in:
            return
        if ailment is not None:
            self.lose(member, ailment)
            return
        try:
            async with async_boundary(EngineError, "a reading", deadline_s=self.settings.health_timeout_s):
                if member.state is MemberState.SUSPECT:
                    await self._clear(member)
                reading = await member.server.load()
        except AgentRLError as error:
            _log.info("no reading of server %s: %s", member.server.url, error)
            return
        if member.state.is_in and not self.is_paused():  # what a pause holds looks like a queue
            member.reading = reading
            member.concurrency.read(reading, in_flight=member.in_flight)

    async def _clear(self, member: Member) -> None:
        """A suspect answers: it serves on, unless it is another process with other weights."""
        version = await member.server.weight_version()
        if self.changing.locked() or member.state is not MemberState.SUSPECT:
            return
        if version == self.version():
            member.state = MemberState.SERVING
        else:
            self.lose(member, f"it serves weights of version {version} instead of {self.version()}")

    async def _ailment(self, server: InferenceServer) -> str | None:
        """Why a server cannot serve; ``None`` when it says in time that it is healthy."""
        deadline_s, clock = self.settings.health_timeout_s, asyncio.get_running_loop().time
        for _ in range(MOST_QUESTIONS):
            began = clock()
            try:
                async with async_boundary(EngineError, "a health check", deadline_s=deadline_s + BUSY_LOOP_S / 2):
                    if await server.is_healthy(deadline_s=deadline_s):
                        return None
            except EngineError as error:
                _log.info("no answer of server %s to a health check: %s", server.url, error)
            except AgentRLError as error:
                return str(error)
            seconds = clock() - began
            if seconds < deadline_s:
                return "its health route cannot be reached, or tells of a failure"
            if seconds < deadline_s + BUSY_LOOP_S:
                break
        return f"its health route did not answer within {deadline_s:g} s"

    async def _bring_back(self, member: Member) -> None:
        """Try until the server serves again or is given up."""
        wait_s = self.settings.retry_s
        while member.state is MemberState.LOST:
            if member.attempts >= self.settings.attempts:
                self._give_up(member)
                return
            try:
                if await self._attempt(member):
                    return
            except TrainingError as error:
                self.on_failure(error)
                self._give_up(member)
                return
            except AgentRLError as error:
                self.say(f"server {member.server.url} could not be brought back: {error}")
                wait_s = min(2 * wait_s, self.settings.longest_retry_s)
            await asyncio.sleep(wait_s)

    def _give_up(self, member: Member) -> None:
        self.say(f"server {member.server.url} is given up after {member.attempts} attempts")
        member.state = MemberState.REMOVED
        self.on_change()

    async def _attempt(self, member: Member) -> bool:
        server = member.server
        if self.restart is None:
            if await self._ailment(server) is not None:
                return False
            member.attempts += 1
        else:
            member.attempts += 1
            server = await self._started_again(self.restart, member)
        async with self.changing:
            await self._prepare(server)
            member.join(server)
        self.say(f"server {server.url} serves again with weights of version {self.version()}")
        self.on_change()
        return True

    async def _started_again(self, restart: Restart, member: Member) -> InferenceServer:
        with suppress(EngineError):  # it is lost anyway
            async with async_boundary(EngineError, "closing it", deadline_s=self.settings.control_timeout_s):
                await member.server.close()
        what = f"the restart of server {member.server.url}"
        async with async_boundary(EngineError, what, deadline_s=self.settings.connect_timeout_s):
            server = await restart(member.index)
        member.server = server
        return server

    async def _prepare(self, server: InferenceServer) -> None:
        """Current weights, verified; then it is held, or goes on, as the pool does."""
        if self.bring_up_to_date is not None:
            await self.bring_up_to_date(server)  # has deadlines of its own
        what = f"the return of server {server.url}"
        async with async_boundary(EngineError, what, deadline_s=self.settings.control_timeout_s):
            if self.bring_up_to_date is None and (version := await server.weight_version()) != self.version():
                raise EngineError(f"{server.url} has weights of another version", got=version, expected=self.version())
            await (server.pause() if self.is_paused() else server.resume())
