"""Results that clients wait for: a request is answered at once with an id, under which its result is fetched.

A request that is sent again (its answer was lost) finds the future of the first time, and is not computed twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentrl.errors import AgentRLError, EngineError, TrainingError, UsageError, described_error, shortened
from agentrl.training_service.wire import MEDIA_TYPE

_log = logging.getLogger(__name__)
JSON = "application/json"
KEPT_S = 600.0
"""Seconds for which a result is kept after it was fetched, and could be asked for again."""
UNFETCHED_S = 6 * 3600.0
"""Seconds for which a result is kept that nobody has fetched."""
MOST_BYTES = 2 << 30
"""Of all results together; those that were fetched first go first."""


class Gone(UsageError):
    """A result that is kept no more, or was never there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedResult:
    """What a client fetches."""

    body: bytes
    media_type: str = JSON

    @classmethod
    def of(cls, data: Any) -> FetchedResult:
        """Make a result of JSON."""
        return cls(body=orjson.dumps(data))

    @classmethod
    def failure(cls, error: BaseException) -> FetchedResult:
        """Describe an error in the client's categories: the user's requests are not to be tried again."""
        if isinstance(error, UsageError | TrainingError):
            return cls.of({"error": str(error), "category": "user"})
        if not isinstance(error, asyncio.CancelledError | EngineError):
            _log.error("a request of the training service failed", exc_info=error)
        text = "the request was cancelled" if isinstance(error, asyncio.CancelledError) else described_error(error)
        return cls.of({"error": str(error) if isinstance(error, AgentRLError) else text, "category": "server"})


def protocol_buffer(body: bytes) -> FetchedResult:
    """Make a result of a message's bytes."""
    return FetchedResult(body=body, media_type=MEDIA_TYPE)


def fingerprint(raw: bytes) -> bytes:
    """Return what tells two bodies apart."""
    return hashlib.sha256(raw).digest()


@dataclass(slots=True, eq=False)
class Future:
    """One request's result, now or later."""

    request_id: str
    digest: bytes
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the first answer."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: FetchedResult | None = None
    since: float = field(default_factory=time.monotonic)
    """When it was made, ended or was fetched last."""
    is_fetched: bool = False
    task: asyncio.Task[FetchedResult] | None = None

    def set(self, result: FetchedResult) -> None:
        """End it; a second result is not taken."""
        if self.result is None:
            self.result, self.since = result, time.monotonic()
            self.done.set()

    def announcement(self) -> dict[str, Any]:
        """Give the answer to the request."""
        return {"request_id": self.request_id, **self.extra}


class Futures:
    """All results that are waited for or kept."""

    def __init__(self) -> None:
        self._by_id: dict[str, Future] = {}
        self._running = 0

    @property
    def running(self) -> int:
        """Futures that have a task which is not over."""
        return self._running

    def known(self, request_id: str, digest: bytes) -> Future | None:
        """Find the future of a request that is sent again; ``None`` for a new one.

        Raises:
            UsageError: another request had this place.
        """
        found = self._by_id.get(request_id)
        if found is not None and found.digest != digest:
            raise UsageError(
                "another request with this number was sent before",
                got=request_id,
                expected="a number of its own, or the same body",
            )
        return found

    def add(self, request_id: str, digest: bytes, **extra: Any) -> Future:
        """Make the future of a new request."""
        future = self._by_id[request_id] = Future(request_id, digest, extra)
        return future

    def run(self, future: Future, work: Coroutine[Any, Any, FetchedResult]) -> None:
        """Let a task end a future, whatever happens to it."""

        def settle(task: asyncio.Task[FetchedResult]) -> None:
            self._running -= 1
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            future.set(task.result() if error is None else FetchedResult.failure(error))

        self._running += 1
        future.task = asyncio.create_task(work, name=f"request {future.request_id}")
        future.task.add_done_callback(settle)

    async def fetch(self, request_id: str, *, wait_s: float) -> FetchedResult | None:
        """Wait for a result; ``None`` if it is not there in time.

        Raises:
            Gone: it is not known, or not kept any more.
        """
        future = self._by_id.get(request_id)
        if future is None:
            raise Gone(
                "there is no such request here",
                got=shortened(request_id),
                expected="one that this server has answered",
                hint="the server was started again, or the result was not fetched for too long",
            )
        try:
            async with asyncio.timeout(wait_s):
                await future.done.wait()
        except TimeoutError:
            return None
        future.is_fetched, future.since = True, time.monotonic()
        return future.result

    def cancel(self, request_id: str) -> None:
        """Give a request up; one that is over, or not known, is left as it is."""
        future = self._by_id.get(request_id)
        if future is not None and future.task is not None:
            future.task.cancel()

    def drop(self, prefixes: Sequence[str]) -> None:
        """Forget the requests of a session that has ended, and give up those that run."""
        for request_id in [own for own in self._by_id if own.startswith(tuple(prefixes))]:
            self.cancel(request_id)
            future = self._by_id.pop(request_id)
            future.set(FetchedResult.failure(UsageError("the session has ended")))

    def sweep(self) -> None:
        """Forget results that nobody will ask for."""
        now = time.monotonic()
        ended = [future for future in self._by_id.values() if future.result is not None]
        ended.sort(key=lambda future: (not future.is_fetched, future.since))
        total = sum(len(future.result.body) for future in ended if future.result is not None)
        for future in ended:
            is_old = now - future.since > (KEPT_S if future.is_fetched else UNFETCHED_S)
            if is_old or total > MOST_BYTES:
                total -= len(future.result.body) if future.result is not None else 0
                del self._by_id[future.request_id]

    async def close(self) -> None:
        """Give up everything that runs."""
        tasks = [future.task for future in self._by_id.values() if future.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
