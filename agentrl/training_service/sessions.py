"""A client's session with its runs, and the order of a run's requests.

Requests of a run have numbers, from 1 on. They may arrive in any order and more than once, and are worked off in the
order of their numbers, one at a time; a gap waits for the request that fills it.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from agentrl.errors import EngineError, UsageError
from agentrl.training_service.futures import FetchedResult, Future
from agentrl.training_service.runs import TrainingRun
from agentrl.training_service.store import now

MOST_PENDING = 4096
"""Requests of one run that wait for their turn."""
MOST_WAITING_BYTES = 1 << 30
"""Of the bodies of all requests that wait for their turn."""
ENDED = UsageError("the run has ended")
Work: TypeAlias = Callable[[], FetchedResult]


class Busy(EngineError):
    """The service has enough to do; the client tries again later."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for its turn."""

    future: Future
    work: Work
    bytes: int


@dataclass(slots=True, eq=False)
class ClientSession:
    """What one client has made."""

    id: str
    metadata: dict[str, Any] | None
    runs: dict[str, ServedRun] = field(default_factory=dict)
    seen: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class ServedRun:
    """A run with the requests that wait for their turn, by their numbers."""

    id: str
    session: ClientSession
    training: TrainingRun
    metadata: dict[str, Any] | None
    next: int = 1
    waiting: dict[int, Waiting] = field(default_factory=dict)
    ephemeral: int = 0
    """Samplers without a name so far."""
    last_request: datetime.datetime = field(default_factory=now)
    task: asyncio.Task[None] | None = None
    """Works off what waits, while there is anything."""

    @property
    def waiting_bytes(self) -> int:
        """Size of the bodies that wait."""
        return sum(waiting.bytes for waiting in self.waiting.values())

    def check(self, number: int, size: int, others: int) -> None:
        """Refuse a request that cannot be queued; `others` are the bytes that wait in all runs.

        Raises:
            UsageError: its number is over, or too far ahead.
            Busy: there is no room for it now.
        """
        if number < self.next or number in self.waiting:
            raise UsageError("this request was over long ago", got=f"seq_id {number}", expected=f"{self.next} or more")
        if number >= self.next + MOST_PENDING:
            raise UsageError(
                "too many requests wait", got=f"seq_id {number}", expected=f"below {self.next + MOST_PENDING}"
            )
        if number != self.next and others + size > MOST_WAITING_BYTES:
            raise Busy("too much data waits for its turn", expected=f"at most {MOST_WAITING_BYTES >> 20} MiB")

    def queue(self, number: int, waiting: Waiting, compute: Callable[[Work], Awaitable[FetchedResult]]) -> None:
        """Queue a request; `compute` runs one in the training thread."""
        self.last_request = now()
        self.waiting[number] = waiting
        if self.task is None:
            self.task = asyncio.create_task(self._work_off(compute), name=f"run {self.id}")

    async def _work_off(self, compute: Callable[[Work], Awaitable[FetchedResult]]) -> None:
        try:
            while self.next in self.waiting:
                waiting = self.waiting.pop(self.next)
                self.next += 1
                try:
                    waiting.future.set(await compute(waiting.work))
                except asyncio.CancelledError:
                    waiting.future.set(FetchedResult.failure(ENDED))
                    raise
                except Exception as error:
                    waiting.future.set(FetchedResult.failure(error))
                self.session.seen = time.monotonic()
        finally:
            self.task = None

    def end(self) -> None:
        """Fail what waits; what is being computed is of no use to anybody."""
        self.session.runs.pop(self.id, None)
        if self.task is not None:
            self.task.cancel()
        for waiting in self.waiting.values():
            waiting.future.set(FetchedResult.failure(ENDED))
        self.waiting.clear()
