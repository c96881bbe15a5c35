"""Results that clients fetch later: each request is answered immediately with the id of its result.

A request that is retried after its answer was lost gets the future of the first attempt and is not computed twice.
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

from agentrl.errors import AgentRLError, EngineError, TrainingError, UsageError, described_error, shorten
from agentrl.training_service.wire import MEDIA_TYPE

_log = logging.getLogger(__name__)
JSON = "application/json"
KEPT_S = 600.0
"""Seconds for which a fetched result is kept, so that the client can fetch it again."""
UNFETCHED_S = 6 * 3600.0
"""Seconds for which an unfetched result is kept."""
MAX_BYTES = 2 << 30
"""Maximum total size of all results; fetched ones are deleted first, oldest first."""


class UnknownResult(UsageError):
    """No result has this request id, or it has been deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedResult:
    """Result as the client fetches it."""

    body: bytes
    media_type: str = JSON

    @classmethod
    def of(cls, data: Any) -> FetchedResult:
        """Make a result from JSON data."""
        return cls(body=orjson.dumps(data))

    @classmethod
    def failure(cls, error: BaseException) -> FetchedResult:
        """Make a result from an error, with the client's error category; ``user`` means that a retry does not help."""
        if isinstance(error, UsageError | TrainingError):
            return cls.of({"error": str(error), "category": "user"})
        if not isinstance(error, asyncio.CancelledError | EngineError):
            _log.error("a request to the training service failed", exc_info=error)
        text = "the request was cancelled" if isinstance(error, asyncio.CancelledError) else described_error(error)
        return cls.of({"error": str(error) if isinstance(error, AgentRLError) else text, "category": "server"})


def protocol_buffer(body: bytes) -> FetchedResult:
    """Make a result from the bytes of a protocol buffer message."""
    return FetchedResult(body=body, media_type=MEDIA_TYPE)


def fingerprint(raw: bytes) -> bytes:
    """Return a hash that identifies a request's body."""
    return hashlib.sha256(raw).digest()


@dataclass(slots=True, eq=False)
class Future:
    """Pending or completed result of one request."""

    request_id: str
    digest: bytes
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional fields of the immediate answer."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: FetchedResult | None = None
    since: float = field(default_factory=time.monotonic)
    """Monotonic time in seconds when it was created, completed or last fetched."""
    is_fetched: bool = False
    task: asyncio.Task[FetchedResult] | None = None

    def set(self, result: FetchedResult) -> None:
        """Set the result; a second one is ignored."""
        if self.result is None:
            self.result, self.since = result, time.monotonic()
            self.done.set()

    def announcement(self) -> dict[str, Any]:
        """Return the immediate answer to the request."""
        return {"request_id": self.request_id, **self.extra}


class Futures:
    """All pending and kept results."""

    def __init__(self) -> None:
        self._by_id: dict[str, Future] = {}
        self._running = 0

    @property
    def running(self) -> int:
        """Number of futures with a running task."""
        return self._running

    def find_retried(self, request_id: str, digest: bytes) -> Future | None:
        """Find the future of a request that is retried; ``None`` for a new request.

        Raises:
            UsageError: a different request used this id.
        """
        found = self._by_id.get(request_id)
        if found is not None and found.digest != digest:
            raise UsageError(
                "a different request with this number was sent before",
                got=request_id,
                expected="a new number, or the same body",
            )
        return found

    def add(self, request_id: str, digest: bytes, **extra: Any) -> Future:
        """Make the future of a new request."""
        future = self._by_id[request_id] = Future(request_id, digest, extra)
        return future

    def run(self, future: Future, work: Coroutine[Any, Any, FetchedResult]) -> None:
        """Run a task that completes a future, even if it fails or is cancelled."""

        def settle(task: asyncio.Task[FetchedResult]) -> None:
            self._running -= 1
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            future.set(task.result() if error is None else FetchedResult.failure(error))

        self._running += 1
        future.task = asyncio.create_task(work, name=f"request {future.request_id}")
        future.task.add_done_callback(settle)

    async def fetch(self, request_id: str, *, wait_s: float) -> FetchedResult | None:
        """Wait for a result; ``None`` if it is not complete after `wait_s` seconds.

        Raises:
            UnknownResult: no result with this id is kept.
        """
        future = self._by_id.get(request_id)
        if future is None:
            raise UnknownResult(
                "unknown request",
                got=shorten(request_id),
                expected="an id that this server returned",
                hint="send the request again: the server restarted, or the result was not fetched in time",
            )
        try:
            async with asyncio.timeout(wait_s):
                await future.done.wait()
        except TimeoutError:
            return None
        future.is_fetched, future.since = True, time.monotonic()
        return future.result

    def cancel(self, request_id: str) -> None:
        """Cancel a running request; finished and unknown requests are ignored."""
        future = self._by_id.get(request_id)
        if future is not None and future.task is not None:
            future.task.cancel()

    def drop(self, prefixes: Sequence[str]) -> None:
        """Forget the requests of a session that has ended, and cancel the running ones."""
        for request_id in [own for own in self._by_id if own.startswith(tuple(prefixes))]:
            self.cancel(request_id)
            future = self._by_id.pop(request_id)
            future.set(FetchedResult.failure(UsageError("the session has ended")))

    def sweep(self) -> None:
        """Delete expired results, and the oldest ones above `MAX_BYTES`."""
        now = time.monotonic()
        ended = [future for future in self._by_id.values() if future.result is not None]
        ended.sort(key=lambda future: (not future.is_fetched, future.since))
        total = sum(len(future.result.body) for future in ended if future.result is not None)
        for future in ended:
            is_old = now - future.since > (KEPT_S if future.is_fetched else UNFETCHED_S)
            if is_old or total > MAX_BYTES:
                total -= len(future.result.body) if future.result is not None else 0
                del self._by_id[future.request_id]

    async def close(self) -> None:
        """Cancel all running tasks and wait for them."""
        tasks = [future.task for future in self._by_id.values() if future.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
