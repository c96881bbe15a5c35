"""Pool of servers that acts as one engine.

    generate() ─► router: the session's server, else the least loaded ─► InferenceServer.generate ─► answer
                    ▲                                                        │ the server is lost, or stale
                    └───────────── the same request again ◄──────────────────┘

The pool resubmits a request whose server is lost to another one. A broken connection leaves no partial answer, so the
prompt is sent again, and callers do not see an aborted answer. `Generation.resubmissions` counts the resubmissions.
Answers with unpublished versions, or versions older than the request, are discarded, and their server is lost. Other
invalid answers are failures of their server, like its error statuses: they count for its circuit breaker.

Weight sync uses the pool's `group` directly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.engine import (
    EngineMetrics,
    GenerateRequest,
    Generation,
    InferenceServer,
    PolicyEngine,
    ServerLost,
    StopReason,
)
from agentrl.engine.answer_check import check_answer
from agentrl.errors import AgentRLError, EngineError
from agentrl.errors.deadlines import async_boundary
from agentrl.serving.pool.group import PoolGroup, Restart
from agentrl.serving.pool.member import Member, PoolSettings
from agentrl.serving.request import check_is_new

__all__ = ["PoolSettings", "ServerPool"]

_log = logging.getLogger(__name__)
NOTHING_SAMPLED = Generation(token_ids=[], logprobs=[], versions=[], stop_reason=StopReason.ABORT)


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """Request with its position in the router."""

    session_id: str
    tokens: int
    """Maximum cache use in tokens: the prompt and the longest possible answer."""
    server: int | None = None
    """Index of the server; ``None`` while the request waits for one."""


@dataclass(slots=True)
class ServerSlots:
    """Requests and tokens in flight at one server, with its limit."""

    limit: int = 0
    """Maximum number of concurrent requests; 0 for a server that does not serve."""
    requests: int = 0
    tokens: int = 0
    """Number of tokens in flight."""

    @property
    def is_free(self) -> bool:
        """True if the server accepts another request."""
        return self.requests < self.limit


@dataclass(slots=True)
class Router:
    """Router that assigns requests to servers in order of arrival, within the servers' limits."""

    servers: list[ServerSlots]
    is_held: bool = False
    """True if no request is assigned, during a pause."""
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    _homes: dict[str, int] = field(default_factory=dict)

    def enter(self, ticket: QueuedRequest) -> None:
        """Add a request that waits for a server; call `place` afterwards."""
        self.waiting.append(ticket)

    def leave(self, ticket: QueuedRequest) -> None:
        """Remove a finished or aborted request; call `place` afterwards."""
        if ticket.server is None:
            self.waiting.remove(ticket)
            return
        server = self.servers[ticket.server]
        server.requests -= 1
        server.tokens -= ticket.tokens
        ticket.server = None

    def place(self) -> list[QueuedRequest]:
        """Assign waiting requests to servers, and return the requests that were assigned."""
        placed: list[QueuedRequest] = []
        passed: list[QueuedRequest] = []
        while self.waiting and not self.is_held and any(server.is_free for server in self.servers):
            ticket = self.waiting.popleft()
            index = self._choose(ticket.session_id)
            if index is None:
                passed.append(ticket)
            else:
                self._take(ticket, index)
                placed.append(ticket)
        self.waiting.extendleft(reversed(passed))
        return placed

    def end_session(self, session_id: str) -> None:
        """Forget the server of a session."""
        self._homes.pop(session_id, None)

    def _choose(self, session_id: str) -> int | None:
        home = self._homes.get(session_id)
        if home is not None and self.servers[home].limit:
            return home if self.servers[home].is_free else None
        free = [index for index, server in enumerate(self.servers) if server.is_free]
        return min(free, key=lambda index: self.servers[index].tokens, default=None)

    def _take(self, ticket: QueuedRequest, index: int) -> None:
        ticket.server = index
        self._homes[ticket.session_id] = index
        self.servers[index].requests += 1
        self.servers[index].tokens += ticket.tokens


@dataclass(slots=True, eq=False)
class PoolRequest:
    """Request in the pool, over all its attempts."""

    request: GenerateRequest
    resubmissions: int = 0
    is_aborted: bool = False
    member: Member | None = None
    """Server that is sampling it."""
    _placed: asyncio.Future[None] = field(init=False)

    @property
    def wire_request(self) -> GenerateRequest:
        """Request as sent to the server. Each attempt has its own id: a lost server may still run the previous one."""
        if not self.resubmissions:
            return self.request
        return replace(self.request, request_id=f"{self.request.request_id}/again-{self.resubmissions}", on_tokens=None)

    def new_attempt(self) -> QueuedRequest:
        """Return the queue entry of the next attempt."""
        self._placed = asyncio.get_running_loop().create_future()
        tokens = len(self.request.prompt_ids) + self.request.params.max_tokens
        return QueuedRequest(session_id=self.request.session_id, tokens=tokens)

    async def wait(self) -> None:
        """Wait until the attempt has a server, the request is aborted, or the pool fails."""
        if not self.is_aborted:
            await self._placed

    def mark_placed(self) -> None:
        """Record that the attempt has a server."""
        if not self._placed.done():
            self._placed.set_result(None)

    def abort(self) -> None:
        """Stop waiting; the caller gets the answer sampled so far."""
        self.is_aborted = True
        self.mark_placed()

    def fail(self, error: AgentRLError) -> None:
        """Fail the request with the pool's error."""
        if not self._placed.done():
            self._placed.set_exception(error)
            self._placed.exception()  # marks it as retrieved, as no task may be waiting


@dataclass(slots=True)
class PoolTotals:
    """Counts since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    """Sampled tokens of finished answers; those of running requests are not known yet."""
    resubmissions: int = 0
    _requests: int = 0
    _busy_s: float = 0.0
    _busy_since: float = 0.0

    def begin(self, request: GenerateRequest) -> None:
        """Count a new request."""
        if not self._requests:
            self._busy_since = time.perf_counter()
        self._requests += 1
        self.prompt_tokens += len(request.prompt_ids)

    def end(self) -> None:
        """Count a finished request."""
        self._requests -= 1
        if not self._requests:
            self._busy_s += time.perf_counter() - self._busy_since

    def count_answer(self, answer: Generation) -> None:
        """Count the tokens of an answer."""
        self.cached_tokens += answer.cached_tokens
        self.sampled_tokens += len(answer.token_ids)

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self._requests else 0.0)


def pool_metrics(totals: PoolTotals, router: Router, members: Sequence[Member]) -> EngineMetrics:
    """Return the metrics of a pool from its last readings, without I/O."""
    loads = [member.reading for member in members if member.reading is not None]
    return EngineMetrics(
        running=sum(slots.requests for slots in router.servers),
        waiting=len(router.waiting),
        prompt_tokens=totals.prompt_tokens,
        cached_tokens=totals.cached_tokens,
        sampled_tokens=totals.sampled_tokens,
        busy_s=totals.busy_s,
        details={
            "servers": len(members),
            "servers_serving": sum(member.limit > 0 for member in members),
            "servers_lost": sum(member.losses for member in members),
            "resubmissions": totals.resubmissions,
            "concurrency": sum(member.limit for member in members),
            "tokens_in_flight": sum(slots.tokens for slots in router.servers),
            "server_running": sum(load.running for load in loads),
            "server_waiting": sum(load.waiting for load in loads),
            "cache_used": max((load.cache_used for load in loads), default=0.0),
            "preemptions": sum(load.preemptions for load in loads),
        },
    )


class ServerPool(PolicyEngine):
    """Engine that distributes requests over several servers.

    Args:
        servers: At least one; connected by `start`, closed by `close`.
        settings: Deadlines and limits.
        restart: Restarts a launched server; without it, the pool waits for lost servers to return.
        version: Initial weight version of the servers.
        say: Called with messages for the user: losses, recoveries, long waits; writes to the log by default.
    """

    def __init__(
        self,
        servers: Sequence[InferenceServer],
        settings: PoolSettings | None = None,
        *,
        restart: Restart | None = None,
        version: int = 0,
        say: Callable[[str], None] = _log.warning,
    ) -> None:
        self.settings = settings or PoolSettings()
        self.group = PoolGroup(
            servers,
            self.settings,
            restart=restart,
            version=version,
            on_change=self._place,
            on_failure=self._fail,
            say=say,
        )
        """Servers, for weight sync."""
        self._router = Router([ServerSlots() for _ in servers])
        self._requests: dict[str, PoolRequest] = {}
        self._tickets: dict[QueuedRequest, PoolRequest] = {}
        self._totals = PoolTotals()
        self._failure: AgentRLError | None = None
        self._starting = asyncio.Lock()

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self.group.version

    @property
    def servers(self) -> list[InferenceServer]:
        """Servers that are serving or suspect."""
        return self.group.servers

    async def start(self) -> None:
        """Connect to the servers and start their monitors; idempotent."""
        async with self._starting:
            self._check_open()
            if not self.group.members:
                self.capabilities = await self.group.start()
                self._place()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn on one of the servers. Waits while all servers are lost, until the last one is removed.

        Raises:
            UsageError: these servers cannot serve the request.
            EngineError: a server answered with an error, or the request lost its server too often.
            ServersLost: no server is left.
        """
        self._check_open()
        if not self.group.members:
            await self.start()
        check_is_new(request, self._requests)
        pending = PoolRequest(request)
        self._requests[request.request_id] = pending
        self._totals.begin(request)
        try:
            answer = await self._serve(pending)
        finally:
            del self._requests[request.request_id]
            self._totals.end()
        self._totals.count_answer(answer)
        return answer

    async def _serve(self, pending: PoolRequest) -> Generation:
        while True:
            answer = await self._attempt(pending)
            if answer is None and pending.is_aborted:
                answer = NOTHING_SAMPLED
            if answer is not None:
                return replace(answer, resubmissions=pending.resubmissions) if pending.resubmissions else answer
            self._check_open()
            pending.resubmissions += 1
            self._totals.resubmissions += 1
            if pending.resubmissions > self.settings.resubmissions:
                raise EngineError(
                    f"request {pending.request.request_id} lost its server too often",
                    got=f"{pending.resubmissions} times",
                    expected=f"at most {self.settings.resubmissions}",
                )

    async def _attempt(self, pending: PoolRequest) -> Generation | None:
        """Wait for a server and its answer; ``None`` if the server is lost, or the request aborted before sampling."""
        ticket = pending.new_attempt()
        self._tickets[ticket] = pending
        self._router.enter(ticket)
        self._place()
        try:
            await pending.wait()
            if ticket.server is None or pending.is_aborted:
                return None
            return await self._ask(self.group.members[ticket.server], pending)
        finally:
            del self._tickets[ticket]
            self._router.leave(ticket)
            self._place()

    async def _ask(self, member: Member, pending: PoolRequest) -> Generation | None:
        oldest, url = self.version, member.server.url
        pending.member = member
        try:
            answer = await self._call(member, pending)
            if answer is None or not self._is_current(member, answer, oldest):
                return None
            capabilities = member.server.capabilities
            answer = check_answer(answer, pending.request, capabilities, version=self.version, engine=f"server {url}")
        except ServerLost:
            self.group.monitor.suspect(member)
            return None
        except EngineError as error:
            open_s = member.breaker.record_failure()
            if open_s is not None:
                self.group.say(f"server {url} gets no requests for {open_s:g} s because its answers fail: {error}")
            raise
        finally:
            pending.member = None
        member.attempts = 0
        if member.breaker.record_success():
            self.group.say(f"server {url} gets requests again: it answered one")
        return answer

    async def _call(self, member: Member, pending: PoolRequest) -> Generation | None:
        """Return a server's answer; ``None`` if the server was lost in the meantime."""
        answer: Generation | None = None
        with member.track_call() as call:
            async with async_boundary(EngineError, f"an answer of {member.server.url}", deadline_s=None):
                answer = await member.server.generate(pending.wire_request)
        return None if call.is_lost else answer

    def _is_current(self, member: Member, answer: Generation, oldest: int) -> bool:
        versions = answer.versions
        if not versions or (oldest <= min(versions) and max(versions) <= self.version):
            return True
        why = f"it sampled with weights of version {sorted(set(versions))}, expected {oldest} to {self.version}"
        self.group.monitor.lose(member, why)
        return False

    def _place(self) -> None:
        """Assign waiting requests to servers; call after any change."""
        if not self._router.waiting:
            return
        self._router.is_held = self.group.is_paused
        for slots, member in zip(self._router.servers, self.group.members, strict=False):
            slots.limit = member.limit
        for ticket in self._router.place():
            self._tickets[ticket].mark_placed()

    async def abort(self, request_id: str) -> bool:
        """End a request with the tokens sampled so far; returns False if it is not running."""
        pending = self._requests.get(request_id)
        if pending is None:
            return False
        member = pending.member
        pending.abort()
        if member is not None:
            with suppress(EngineError):  # the server is lost, and the request ends without it
                async with async_boundary(EngineError, "an abort", deadline_s=self.settings.health_timeout_s):
                    await member.server.abort(pending.wire_request.request_id)
        return True

    async def pause(self) -> None:
        """Hold all requests in the pool and on every server; servers that fail to pause are marked as lost."""
        await self.group.pause()

    async def resume(self) -> None:
        """Resume every server; servers that fail to do so are marked as lost."""
        await self.group.resume()

    async def update_weights(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Send weights through the pool's weight sync, without verification."""
        await self.group.deliver(weights, version)

    async def end_session(self, session_id: str) -> None:
        """Forget the server of a session."""
        self._router.end_session(session_id)

    def metrics(self) -> EngineMetrics:
        """Return the pool's counts and the servers' last readings."""
        return pool_metrics(self._totals, self._router, self.group.members)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: AgentRLError) -> None:
        """Stop serving: waiting requests fail; requests at a server are still answered."""
        if self._failure is None:
            self._failure = error
            for pending in self._requests.values():
                pending.fail(error)

    async def close(self) -> None:
        """Close the connections to the servers; running requests raise `EngineError`."""
        self._fail(EngineError("the pool of servers is closed"))
        await self.group.stop()
        await asyncio.sleep(0)  # lets requests see that their server is lost
        await self.group.close()
