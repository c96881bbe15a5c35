"""Client sessions with their runs, and the order of each run's requests.

Requests of a run are numbered from 1. They may arrive in any order and more than once, and are executed one at a time
in the order of their numbers; after a gap, requests wait until the missing one arrives.
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

MAX_PENDING = 4096
"""Maximum number of waiting requests of one run."""
MAX_WAITING_BYTES = 1 << 30
"""Maximum total size of the bodies of all waiting requests."""
ENDED = UsageError("the run has ended")
Work: TypeAlias = Callable[[], FetchedResult]


class Busy(EngineError):
    """The service is overloaded; the client retries later."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that waits for execution."""

    future: Future
    work: Work
    bytes: int


@dataclass(slots=True, eq=False)
class ClientSession:
    """One client's session with its runs."""

    id: str
    metadata: dict[str, Any] | None
    runs: dict[str, ServedRun] = field(default_factory=dict)
    seen: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class ServedRun:
    """A run and its waiting requests by number."""

    id: str
    session: ClientSession
    training: TrainingRun
    metadata: dict[str, Any] | None
    next: int = 1
    waiting: dict[int, WaitingRequest] = field(default_factory=dict)
    unnamed_samplers: int = 0
    """Number of unnamed samplers made so far."""
    last_request: datetime.datetime = field(default_factory=now)
    task: asyncio.Task[None] | None = None
    """Task that executes waiting requests; ``None`` while the next one is missing."""

    @property
    def waiting_bytes(self) -> int:
        """Total size of the waiting requests' bodies."""
        return sum(waiting.bytes for waiting in self.waiting.values())

    def check(self, number: int, size: int, others: int) -> None:
        """Reject a request that cannot be queued; `others` is the number of bytes waiting in all runs.

        Raises:
            UsageError: the number was used, or is too far ahead.
            Busy: too much data is waiting.
        """
        if number < self.next or number in self.waiting:
            raise UsageError(
                "a request with this number was sent before", got=f"seq_id {number}", expected=f"{self.next} or more"
            )
        if number >= self.next + MAX_PENDING:
            raise UsageError(
                "too many requests are waiting", got=f"seq_id {number}", expected=f"below {self.next + MAX_PENDING}"
            )
        if number != self.next and others + size > MAX_WAITING_BYTES:
            raise Busy("the waiting requests are too large", expected=f"at most {MAX_WAITING_BYTES >> 20} MiB")

    def queue(self, number: int, waiting: WaitingRequest, compute: Callable[[Work], Awaitable[FetchedResult]]) -> None:
        """Queue a request; `compute` executes it in the training thread."""
        self.last_request = now()
        self.waiting[number] = waiting
        if self.task is None:
            self.task = asyncio.create_task(self._execute_waiting(compute), name=f"run {self.id}")

    async def _execute_waiting(self, compute: Callable[[Work], Awaitable[FetchedResult]]) -> None:
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
        """Fail the waiting requests and discard the running one."""
        self.session.runs.pop(self.id, None)
        if self.task is not None:
            self.task.cancel()
        for waiting in self.waiting.values():
            waiting.future.set(FetchedResult.failure(ENDED))
        self.waiting.clear()
