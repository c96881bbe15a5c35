"""How a pool watches its servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from agentrl.config.engines import ServerEngineConfig

QUEUE_FACTOR = 2
"""A server never has more requests than this many times those that it samples at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Deadlines and counts."""

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
        """The settings of a run: each server starts with what it samples at once."""
        return cls(
            concurrency=config.max_running,
            most_concurrency=QUEUE_FACTOR * config.max_running,
            connect_timeout_s=config.start_timeout_s,
            health_timeout_s=config.health_timeout_s,
        )
