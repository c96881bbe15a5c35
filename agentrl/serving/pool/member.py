"""Members of a server pool: state, circuit breaker, adaptive concurrency, and the settings of watching them."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from agentrl.config.engines import ServerEngineConfig
from agentrl.engine import InferenceServer, ServerLoad

LONGEST_FACTOR = 16
"""A server that fails every trial rests at most so many times as long as after the first failure."""


class BreakerState(enum.StrEnum):
    """States of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """One request passes: the trial."""


class CircuitBreaker:
    """Circuit breaker of one server: `failures` in a row open it, the first time for `open_s` seconds of `clock`."""

    def __init__(self, *, failures: int, open_s: float, clock: Callable[[], float]) -> None:
        self._most_failures = failures
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._factor = 1
        self._opened: float | None = None

    @property
    def state(self) -> BreakerState:
        """State now."""
        if self._opened is None:
            return BreakerState.CLOSED
        is_over = self._clock() - self._opened >= self._open_s * self._factor
        return BreakerState.HALF_OPEN if is_over else BreakerState.OPEN

    def limit(self, most: int) -> int:
        """Return how many requests may run at once, where `most` may run while it is closed."""
        if self._opened is None:
            return most
        return min(most, 1) if self.state is BreakerState.HALF_OPEN else 0

    def record_success(self) -> None:
        """Count a success: it closes the breaker, unless it is a late answer while the breaker is open."""
        if self.state is not BreakerState.OPEN:
            self.reset()

    def record_failure(self) -> None:
        """Count a failure; those while it is open do not count."""
        state = self.state
        if state is BreakerState.HALF_OPEN:
            self._factor = min(2 * self._factor, LONGEST_FACTOR)
            self._opened = self._clock()
        elif state is BreakerState.CLOSED:
            self._failures += 1
            if self._failures >= self._most_failures:
                self._opened = self._clock()

    def reset(self) -> None:
        """Start anew, for a new server."""
        self._failures, self._factor, self._opened = 0, 1, None


ROOMY = 0.8
"""Share of the cache below which more requests fit."""
PATIENCE = 2
"""Readings in a row with a queue before it counts: one shows only that requests have just arrived."""


@dataclass(slots=True, kw_only=True)
class AdaptiveConcurrency:
    """The limit of one server.

    Args:
        limit: Requests at once, to begin with: those that the server samples at once. While its cache has room, a queue
            of requests on their way into it never takes the limit below that.
        least: Lower bound of the limit.
        most: Upper bound of the limit.
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
        """Adapt the limit to a reading of the server, which has `in_flight` requests by our own count."""
        preempted = self._preemptions is not None and load.preemptions > self._preemptions
        self._preemptions = load.preemptions
        self._queued_readings = self._queued_readings + 1 if load.waiting else 0
        if preempted and load.cache_used >= ROOMY:  # an update of the weights preempts, too, and means nothing
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
        """Start the counts anew, for a new server; the limit stays."""
        self._preemptions, self._queued_readings = None, 0

    @staticmethod
    def _step(value: int) -> int:
        return 1 + value // 8

    def _set(self, limit: int) -> None:
        self.limit = max(self.least, min(self.most, limit))


QUEUE_FACTOR = 2
"""A server never has more requests than this many times those that it samples at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Deadlines and counts of a pool."""

    concurrency: int = 64
    """Requests at once that a server gets to begin with; adapted from its own readings."""
    most_concurrency: int = 1024
    """Never more than that."""
    connect_timeout_s: float = 600.0
    """Deadline of the first answer of a server."""
    control_timeout_s: float = 60.0
    """Deadline of a pause or a resume."""
    health_timeout_s: float = 30.0
    """A server that does not answer its health route for so long is lost."""
    check_every_s: float = 1.0
    """Seconds between two checks of a server."""
    retry_s: float = 1.0
    """Seconds before a lost server is tried again; twice as long after every attempt that failed."""
    longest_retry_s: float = 30.0
    attempts: int = 5
    """A lost server that could not be brought back so often in a row is given up."""
    resubmissions: int = 8
    """How often one request may lose its server; then it fails."""
    breaker_failures: int = 5
    """Failed answers in a row after which a server rests."""
    breaker_open_s: float = 5.0
    """Seconds of that rest."""

    @classmethod
    def from_config(cls, config: ServerEngineConfig) -> Self:
        """Return the settings of a run: each server starts with what it samples at once."""
        return cls(
            concurrency=config.max_running,
            most_concurrency=QUEUE_FACTOR * config.max_running,
            connect_timeout_s=config.start_timeout_s,
            health_timeout_s=config.health_timeout_s,
        )


class MemberState(enum.StrEnum):
    """States of a pool's server."""

    SERVING = "serving"
    SUSPECT = "suspect"
    """A connection broke: it gets nothing new until it has answered a check."""
    LOST = "lost"
    """It takes part again when it has come back and has the current weights."""
    REMOVED = "removed"
    """Given up for the rest of the run."""

    @property
    def is_in(self) -> bool:
        """True if its requests are still awaited, and it gets new weights."""
        return self in (MemberState.SERVING, MemberState.SUSPECT)


class Call:
    """One request at a server, in the task that waits for its answer; a context manager.

    The loss of the server cancels what the block awaits, and ends the block: `is_lost` is true then. All other
    cancellations of the task pass.
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
        """End the block: its server is lost."""
        self.is_lost = True
        self._task.cancel()


@dataclass(slots=True, eq=False)
class Member:
    """A server and its state."""

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
    calls: set[Call] = field(default_factory=set)
    """Requests that it was given."""
    gone: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done once the server is lost; renewed when it comes back."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it should be checked without delay."""

    @classmethod
    def of(cls, index: int, server: InferenceServer, settings: PoolSettings, clock: Callable[[], float]) -> Member:
        """Return a member that serves."""
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
        """Mark it as lost, and cancel its requests."""
        self.state, self.why, self.reading = MemberState.LOST, why, None
        self.losses += 1
        if not self.gone.done():
            self.gone.set_result(None)
        for call in self.calls:
            call.lose()
        self.calls = set()
        self.wake.set()

    def track_call(self) -> Call:
        """Return a context manager around a request that this server answers."""
        return Call(self)

    def join(self, server: InferenceServer) -> None:
        """Take the server back, perhaps as another process."""
        self.server, self.state, self.why = server, MemberState.SERVING, ""
        self.gone = asyncio.get_running_loop().create_future()
        self.breaker.reset()
        self.concurrency.forget()


async def first_of(call: asyncio.Future[Any], gone: asyncio.Future[None]) -> None:
    """Wait until a server has answered, or is lost."""
    both: set[asyncio.Future[Any]] = {call, gone}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)


async def end(call: asyncio.Future[Any], *, within_s: float) -> None:
    """Cancel a call and wait until it has cleaned up after itself. Later exceptions are ignored."""
    if not call.done():
        call.cancel()
        await asyncio.wait({call}, timeout=within_s)
    if call.done() and not call.cancelled():
        call.exception()
