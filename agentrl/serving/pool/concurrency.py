"""How many requests a server gets at once: more while its cache has room, fewer when it throws requests out.

A state machine of counts, without I/O. More requests at once raise throughput until the key-value cache is full; beyond
that the server throws requests out and computes them again, and a long queue inside the server only binds requests that
another server could take.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.server import ServerLoad

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
        least: The limit never falls below it.
        most: It never grows above it.
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
        """Take a reading into account.

        Args:
            load: What the server says.
            in_flight: Requests that it was given and has not answered, by our own count.
        """
        preempted = self._preemptions is not None and load.preemptions > self._preemptions
        self._preemptions = load.preemptions
        self._queued_readings = self._queued_readings + 1 if load.waiting else 0
        if preempted and load.cache_used >= ROOMY:  # an update of the weights throws out, too, and says nothing
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
        """A new server took the place of the old one: its counts begin anew, the limit stays."""
        self._preemptions, self._queued_readings = None, 0

    @staticmethod
    def _step(value: int) -> int:
        return 1 + value // 8

    def _set(self, limit: int) -> None:
        self.limit = max(self.least, min(self.most, limit))
