"""The circuit breaker of one server: after failures in a row it gets no requests for a while, then one as a trial.

CLOSED ── `failures` in a row ──► OPEN ── its seconds are over ──► HALF_OPEN
  ▲                                 ▲                                 │ one request is let through
  └────────── it succeeds ──────────┼─────────────────────────────────┤
                                    └── it fails: twice as long ──────┘
"""

from __future__ import annotations

import enum
from collections.abc import Callable

LONGEST_FACTOR = 16
"""A server that fails every trial rests at most so many times as long as after the first failure."""


class BreakerState(enum.StrEnum):
    """Whether requests pass."""

    CLOSED = "closed"
    """All pass."""
    OPEN = "open"
    """None pass."""
    HALF_OPEN = "half_open"
    """One passes: the trial."""


class CircuitBreaker:
    """Counts failures in a row.

    Args:
        failures: So many in a row open it.
        open_s: Seconds for which it stays open the first time.
        clock: Seconds that only grow.
    """

    def __init__(self, *, failures: int, open_s: float, clock: Callable[[], float]) -> None:
        self._most_failures = failures
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._factor = 1
        self._opened: float | None = None

    @property
    def state(self) -> BreakerState:
        """The state now."""
        if self._opened is None:
            return BreakerState.CLOSED
        is_over = self._clock() - self._opened >= self._open_s * self._factor
        return BreakerState.HALF_OPEN if is_over else BreakerState.OPEN

    def limit(self, most: int) -> int:
        """How many requests may run at once, where `most` may run while it is closed."""
        match self.state:
            case BreakerState.CLOSED:
                return most
            case BreakerState.HALF_OPEN:
                return min(most, 1)
            case BreakerState.OPEN:
                return 0

    def record_success(self) -> None:
        """A request succeeded: all pass, unless it is a late answer while the breaker is open."""
        if self.state is not BreakerState.OPEN:
            self.reset()

    def record_failure(self) -> None:
        """A request failed."""
        match self.state:
            case BreakerState.CLOSED:
                self._failures += 1
                if self._failures >= self._most_failures:
                    self._opened = self._clock()
            case BreakerState.HALF_OPEN:
                self._factor = min(2 * self._factor, LONGEST_FACTOR)
                self._opened = self._clock()
            case BreakerState.OPEN:
                pass

    def reset(self) -> None:
        """Start anew: a new server took the place of the old one."""
        self._failures, self._factor, self._opened = 0, 1, None
