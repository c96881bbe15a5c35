"""The numbers of a pool: its own counts, and what the servers said last."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.policy import EngineMetrics, GenerateRequest, Generation
from agentrl.serving.pool.member import Member
from agentrl.serving.pool.router import Router


@dataclass(slots=True)
class PoolTotals:
    """Counts since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    """Of answers that have come; what is being sampled is not known yet."""
    resubmissions: int = 0
    _requests: int = 0
    _busy_s: float = 0.0
    _busy_since: float = 0.0

    def begin(self, request: GenerateRequest) -> None:
        """A request comes."""
        if not self._requests:
            self._busy_since = time.perf_counter()
        self._requests += 1
        self.prompt_tokens += len(request.prompt_ids)

    def end(self) -> None:
        """A request goes."""
        self._requests -= 1
        if not self._requests:
            self._busy_s += time.perf_counter() - self._busy_since

    def answered(self, answer: Generation) -> None:
        """It went with an answer."""
        self.cached_tokens += answer.cached_tokens
        self.sampled_tokens += len(answer.token_ids)

    @property
    def busy_s(self) -> float:
        """Seconds in which there was a request."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self._requests else 0.0)


def pool_metrics(totals: PoolTotals, router: Router, members: Sequence[Member]) -> EngineMetrics:
    """A reading of the pool, without I/O."""
    loads = [member.reading for member in members if member.reading is not None]
    return EngineMetrics(
        running=sum(places.requests for places in router.servers),
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
            "tokens_in_flight": sum(places.tokens for places in router.servers),
            "server_running": sum(load.running for load in loads),
            "server_waiting": sum(load.waiting for load in loads),
            "cache_used": max((load.cache_used for load in loads), default=0.0),
            "preemptions": sum(load.preemptions for load in loads),
        },
    )
