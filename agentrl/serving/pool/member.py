"""Members of a server pool: state, circuit breaker, adaptive concurrency, and the pool's settings."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from agentrl.config.engines import ServerEngineConfig
from agentrl.engine import InferenceServer, ServerLoad

MAX_REST_FACTOR = 16
"""Maximum factor by which repeated failed trials lengthen the time that a breaker stays open."""
ROOMY = 0.8
"""Share of cache use below which more requests fit."""
PATIENCE = 2
"""Consecutive readings with a queue before it counts; a single one may mean that requests have just arrived."""
QUEUE_FACTOR = 2
"""Maximum requests of a server, as a multiple of the requests that it samples at once."""


class BreakerState(enum.StrEnum):
    """States of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """One trial request is allowed."""


class CircuitBreaker:
    """Circuit breaker of one server: opens after `failures` consecutive failures, first for `open_s` seconds."""

    def __init__(self, *, failures: int, open_s: float, clock: Callable[[], float]) -> None:
        self._most_failures = failures
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._factor = 1
        self._opened: float | None = None

    @property
    def state(self) -> BreakerState:
        """Current state."""
        if self._opened is None:
            return BreakerState.CLOSED
        is_over = self._clock() - self._opened >= self._open_s * self._factor
        return BreakerState.HALF_OPEN if is_over else BreakerState.OPEN

    def limit(self, most: int) -> int:
        """Return the maximum number of concurrent requests; `most` while the breaker is closed."""
        if self._opened is None:
            return most
        return min(most, 1) if self.state is BreakerState.HALF_OPEN else 0

    def record_success(self) -> bool:
        """Close the breaker and return True if it was half open; if it is open, the success is a late answer."""
        state = self.state
        if state is not BreakerState.OPEN:
            self.reset()
        return state is BreakerState.HALF_OPEN

    def record_failure(self) -> float | None:
        """Count a failure, and return the seconds for which it opens the breaker; an open one ignores it."""
        state = self.state
        if state is BreakerState.OPEN:
            return None
        self._failures += 1
        if state is BreakerState.HALF_OPEN:
            self._factor = min(2 * self._factor, MAX_REST_FACTOR)
        elif self._failures < self._most_failures:
            return None
        self._opened = self._clock()
        return self._open_s * self._factor

    def reset(self) -> None:
        """Close the breaker and clear its counts, for a new server."""
        self._failures, self._factor, self._opened = 0, 1, None


@dataclass(slots=True, kw_only=True)
class AdaptiveConcurrency:
    """Adaptive limit on the concurrent requests of one server.

    Args:
        limit: Initial limit: the number of requests that the server samples at once. While the server's cache has room,
            a queue never lowers the limit below it.
        least: Minimum limit.
        most: Maximum limit.
    """

    limit: int
    least: int = 1
    most: int = 1024
    _preemptions: int | None = None
    _queued_readings: int = 0
    _first: int = field(init=False)

    def __post_init__(self) -> None:
        self._first = self.limit

    def read(self, load: ServerLoad, *, in_flight: int) -> None:
        """Adapt the limit to the server's load; `in_flight` is the pool's count of its requests."""
        preempted = self._preemptions is not None and load.preemptions > self._preemptions
        self._preemptions = load.preemptions
        self._queued_readings = self._queued_readings + 1 if load.waiting else 0
        if preempted and load.cache_used >= ROOMY:  # weight updates preempt requests, too, and do not count
            fits = load.running if load.waiting else in_flight - self._step(in_flight)
            self._set(min(self.limit, fits))
        elif self._queued_readings >= PATIENCE:
            enough = load.running + self._step(load.running)
            if load.cache_used < ROOMY:
                enough = max(enough, self._first)
            self._set(min(self.limit, max(enough, self.limit - self._step(self.limit))))
        elif load.cache_used < ROOMY and not load.waiting and in_flight >= self.limit:
            self._set(self.limit + self._step(self.limit))

    def forget(self) -> None:
        """Clear the counts, for a new server; the limit does not change."""
        self._preemptions, self._queued_readings = None, 0

    @staticmethod
    def _step(value: int) -> int:
        return 1 + value // 8

    def _set(self, limit: int) -> None:
        self.limit = max(self.least, min(self.most, limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Deadlines and limits of a pool."""

    concurrency: int = 64
    """Initial limit on a server's concurrent requests, adapted to its load."""
    max_concurrency: int = 1024
    """Maximum of that limit."""
    connect_timeout_s: float = 600.0
    """Seconds before a server's first answer."""
    control_timeout_s: float = 60.0
    """Timeout of a pause or resume."""
    health_timeout_s: float = 30.0
    """Seconds without an answer to a health check before a server is lost."""
    check_every_s: float = 1.0
    """Seconds between checks of a server."""
    retry_s: float = 1.0
    """Seconds before the first attempt to recover a lost server is repeated; doubled after every failed attempt."""
    max_retry_s: float = 30.0
    lost_timeout_s: float = 300.0
    """Seconds after which a lost server is removed, if it cannot be restarted and does not return."""
    attempts: int = 5
    """Failed recovery attempts in a row after which a server is removed."""
    resubmissions: int = 8
    """Maximum number of times that a request may lose its server before it fails."""
    breaker_failures: int = 5
    """Number of consecutive failed answers that open a server's circuit breaker."""
    breaker_open_s: float = 5.0
    """Seconds for which the circuit breaker first stays open."""

    @classmethod
    def from_config(cls, config: ServerEngineConfig) -> Self:
        """Return a run's settings: each server's initial limit is the number of requests that it samples at once."""
        return cls(
            concurrency=config.max_num_seqs,
            max_concurrency=QUEUE_FACTOR * config.max_num_seqs,
            connect_timeout_s=config.start_timeout_s,
            health_timeout_s=config.health_timeout_s,
            lost_timeout_s=config.lost_timeout_s,
        )


class MemberState(enum.StrEnum):
    """States of a pool's server."""

    SERVING = "serving"
    SUSPECT = "suspect"
    """A connection broke: the server gets no new requests until it has answered a check."""
    LOST = "lost"
    """The server does not serve until it is recovered and has the current weights."""
    REMOVED = "removed"
    """The server is not used for the rest of the run."""

    @property
    def is_active(self) -> bool:
        """True if the pool waits for the server's answers and sends it new weights."""
        return self in (MemberState.SERVING, MemberState.SUSPECT)


class Call:
    """Context manager around one request to a server.

    If the server is lost, the block is cancelled and exits without an error, and `is_lost` is True. Other cancellations
    of the task propagate.
    """

    __slots__ = ("_cancellations", "_member", "_task", "is_lost")

    def __init__(self, member: Member) -> None:
        self.is_lost = False
        self._member = member

    def __enter__(self) -> Call:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancellations = task, task.cancelling()
        self._member.calls.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._member.calls.discard(self)
        if not self.is_lost:
            return False
        is_alone = self._task.uncancel() <= self._cancellations
        return is_alone and isinstance(error, (Exception, asyncio.CancelledError))

    def lose(self) -> None:
        """Cancel the block, as its server is lost."""
        self.is_lost = True
        self._task.cancel()


@dataclass(slots=True, eq=False)
class Member:
    """Server of a pool and its state."""

    index: int
    server: InferenceServer
    breaker: CircuitBreaker
    concurrency: AdaptiveConcurrency
    state: MemberState = MemberState.SERVING
    reading: ServerLoad | None = None
    why: str = ""
    """Reason why the server is not serving."""
    losses: int = 0
    attempts: int = 0
    """Attempts to recover the server since it last answered a request."""
    calls: set[Call] = field(default_factory=set)
    """Running requests."""
    gone: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Future that is done once the server is lost; replaced when it is recovered."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that triggers a check without delay."""

    @classmethod
    def of(cls, index: int, server: InferenceServer, settings: PoolSettings, clock: Callable[[], float]) -> Member:
        """Make a member that is serving."""
        return cls(
            index=index,
            server=server,
            breaker=CircuitBreaker(failures=settings.breaker_failures, open_s=settings.breaker_open_s, clock=clock),
            concurrency=AdaptiveConcurrency(limit=settings.concurrency, most=settings.max_concurrency),
        )

    @property
    def limit(self) -> int:
        """Current limit on concurrent requests."""
        return self.breaker.limit(self.concurrency.limit) if self.state is MemberState.SERVING else 0

    @property
    def in_flight(self) -> int:
        """Number of running requests."""
        return len(self.calls)

    def lose(self, why: str) -> None:
        """Mark the server as lost, and cancel its requests."""
        self.state, self.why, self.reading = MemberState.LOST, why, None
        self.losses += 1
        if not self.gone.done():
            self.gone.set_result(None)
        for call in self.calls:
            call.lose()
        self.calls = set()
        self.wake.set()

    def track_call(self) -> Call:
        """Return a context manager around a request to this server."""
        return Call(self)

    def join(self, server: InferenceServer) -> None:
        """Serve again, possibly with a new server process."""
        self.server, self.state, self.why = server, MemberState.SERVING, ""
        self.gone = asyncio.get_running_loop().create_future()
        self.breaker.reset()
        self.concurrency.forget()


async def first_of(call: asyncio.Future[Any], gone: asyncio.Future[None]) -> None:
    """Wait until a server has answered or is lost."""
    both: set[asyncio.Future[Any]] = {call, gone}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)


async def end(call: asyncio.Future[Any], *, within_s: float) -> None:
    """Cancel a call and wait until it has cleaned up. Later exceptions are ignored."""
    if not call.done():
        call.cancel()
        await asyncio.wait({call}, timeout=within_s)
    if call.done() and not call.cancelled():
        call.exception()
