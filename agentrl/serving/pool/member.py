"""One server of a pool: whether it serves, what it has, and what is known of its load."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentrl.policy import Generation
from agentrl.server import InferenceServer, ServerLoad
from agentrl.serving.pool.breaker import CircuitBreaker
from agentrl.serving.pool.concurrency import AdaptiveConcurrency
from agentrl.serving.pool.settings import PoolSettings


class MemberState(enum.StrEnum):
    """Whether a server takes part."""

    SERVING = "serving"
    SUSPECT = "suspect"
    """A connection broke: it gets nothing new until it has answered a check."""
    LOST = "lost"
    """It takes part again when it has come back and has the current weights."""
    REMOVED = "removed"
    """Given up for the rest of the run."""

    @property
    def is_in(self) -> bool:
        """Whether its requests are still waited for, and it gets new weights."""
        return self in (MemberState.SERVING, MemberState.SUSPECT)


@dataclass(slots=True, eq=False)
class Member:
    """A server and its state.

    Attributes:
        gone: Done once the server is lost; renewed when it comes back.
        wake: Set when it should be checked, or looked at, without delay.
    """

    index: int
    server: InferenceServer
    breaker: CircuitBreaker
    concurrency: AdaptiveConcurrency
    state: MemberState = MemberState.SERVING
    reading: ServerLoad | None = None
    why: str = ""
    """Why it is not serving."""
    losses: int = 0
    attempts: int = 0
    """Attempts to bring it back since it last answered a request."""
    calls: set[asyncio.Task[Generation]] = field(default_factory=set)
    """Requests that it was given."""
    gone: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, index: int, server: InferenceServer, settings: PoolSettings, clock: Callable[[], float]) -> Member:
        """A member that serves."""
        return cls(
            index=index,
            server=server,
            breaker=CircuitBreaker(failures=settings.breaker_failures, open_s=settings.breaker_open_s, clock=clock),
            concurrency=AdaptiveConcurrency(limit=settings.concurrency, most=settings.most_concurrency),
        )

    @property
    def limit(self) -> int:
        """Requests that it may have at once now."""
        return self.breaker.limit(self.concurrency.limit) if self.state is MemberState.SERVING else 0

    @property
    def in_flight(self) -> int:
        """Requests that it was given and has not answered."""
        return len(self.calls)

    def lose(self, why: str) -> None:
        """It is lost: nobody waits for its answers any more."""
        self.state, self.why, self.reading = MemberState.LOST, why, None
        self.losses += 1
        if not self.gone.done():
            self.gone.set_result(None)
        for call in self.calls:
            call.cancel()
        self.wake.set()

    def join(self, server: InferenceServer) -> None:
        """It is back, perhaps as another process."""
        self.server, self.state, self.why = server, MemberState.SERVING, ""
        self.gone = asyncio.get_running_loop().create_future()
        self.calls = set()
        self.breaker.reset()
        self.concurrency.forget()


async def first_of(call: asyncio.Future[Any], gone: asyncio.Future[None]) -> None:
    """Wait until a server has answered, or is lost."""
    both: set[asyncio.Future[Any]] = {call, gone}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)


async def end(call: asyncio.Future[Any], *, within_s: float) -> None:
    """Cancel a call and wait until it has cleaned up after itself; how it fails then is nobody's concern."""
    if not call.done():
        call.cancel()
        await asyncio.wait({call}, timeout=within_s)
    if call.done() and not call.cancelled():
        call.exception()
