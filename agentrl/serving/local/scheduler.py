"""Scheduler of the local engine: which requests run, in which rows of the cache, and what they compute next.

Nothing here looks at a clock: the same requests, aborts and updates in the same order give the same schedule.

Requests wait in order of arrival (`waiting`), run up to `slots` at a time (`running`), and leave their row to their
session, where the next turn finds it. A row is taken away from an idle session when others need its room, and from the
youngest running request when the oldest ones need it to grow; that request then waits at the front of the queue and
computes its keys and values again.

What a new row's sequence begins with is computed once: it is copied from another row, for which the request waits if
that row is about to compute it. So a group's prompt, the system message of all, and the history of a branch cost the
model one sequence.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from agentrl.config.engines import FEWEST_PER_LANE
from agentrl.engine import GenerateRequest, Generation, StopReason
from agentrl.image import common_tokens
from agentrl.routed_experts import RoutedExperts
from agentrl.serving.local.cache import CacheRow, RowStore
from agentrl.serving.local.forward import SequenceChunk
from agentrl.serving.request import common_prefix

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Gives the text of token ids."""
PIECES_OF_A_CHARACTER = 4
"""Most tokens without a character of their own between the last ones: bytes of a character of UTF-8."""
FEWEST_SHARED = 16
"""Tokens from which on it is worth while to copy, or to wait for, the keys and values of another sequence."""
ANSWER_ROOM = 32
"""Tokens of the answer for which a new row has room at once; longer answers move."""


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """A request in the scheduler."""

    request: GenerateRequest
    future: asyncio.Future[Generation]
    seed: int
    ids: list[int]
    """Prompt and what was sampled so far."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    """Experts of the tokens from the request's `routed_experts_from` on, as they were first computed."""
    row: CacheRow | None = None
    """Held while the job runs."""
    is_new: bool = False
    """Its row was just taken, and holds nothing yet."""
    cached_tokens: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled so far."""
        return len(self.logprobs)

    def add(self, token: int, logprob: float, version: int) -> None:
        """Record a sampled token."""
        if self.first_token is None:
            self.first_token = time.perf_counter()
        if self.request.on_tokens is not None:
            self.request.on_tokens([token])
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def add_routed_experts(self, row: CacheRow) -> None:
        """Record the experts of tokens that were computed."""
        if self.request.routed_experts_from is not None:
            self.routed_experts += row.routed_experts[self.request.routed_experts_from + len(self.routed_experts) :]

    def stop_reason(self, max_context: int, decode: Decode | None = None) -> StopReason | None:
        """Why sampling ends after the latest token; ``None`` when it goes on. Stop texts need `decode`."""
        params = self.request.params
        if self.ids[-1] in params.stop_token_ids or (params.stop and decode and self._ends_in_text(decode)):
            return StopReason.STOP
        full = self.num_sampled >= self.request.params.max_tokens or len(self.ids) >= max_context
        return StopReason.LENGTH if full else None

    def _ends_in_text(self, decode: Decode) -> bool:
        stop = self.request.params.stop
        recent = min(self.num_sampled, max(map(len, stop)) + PIECES_OF_A_CHARACTER)
        text = decode(self.ids[-recent:])
        return any(end in text for end in stop)

    def generation(self, reason: StopReason) -> Generation:
        """The answer as it is now."""
        now = time.perf_counter()
        admitted = self.admitted or now
        first_token = self.first_token or now
        return Generation(
            token_ids=self.ids[len(self.request.prompt_ids) :],
            logprobs=self.logprobs,
            versions=self.versions,
            stop_reason=reason,
            cached_tokens=self.cached_tokens,
            queue_s=admitted - self.submitted,
            prefill_s=first_token - admitted,
            decode_s=now - first_token,
            routed_experts=np.stack(self.routed_experts) if self.routed_experts else None,
        )


class Scheduler:
    """Admits up to `slots` requests and plans steps of at most `prefill_tokens` prompt tokens over all requests."""

    def __init__(self, *, slots: int, prefill_tokens: int, rows: RowStore) -> None:
        self.slots = slots
        self.prefill_tokens = prefill_tokens
        self.rows = rows
        self.waiting: deque[ScheduledRequest] = deque()
        self.running: list[ScheduledRequest] = []
        self.evictions = 0
        self.preemptions = 0
        self._sessions: dict[str, CacheRow] = {}
        self._uses = 0

    @property
    def has_work(self) -> bool:
        """True if any request waits or runs."""
        return bool(self.waiting or self.running)

    def submit(self, job: ScheduledRequest) -> None:
        """Append a request to the queue."""
        self.waiting.append(job)

    def order_waiting(self) -> None:
        """Sort the queue by request id, so that it does not depend on the order of arrival."""
        self.waiting = deque(sorted(self.waiting, key=lambda job: job.request.request_id))

    def plan(self) -> list[SequenceChunk]:
        """Admit requests that fit, and return what each running request computes next."""
        while self.waiting and len(self.running) < self.slots and self._place(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        pieces = []
        budget = self.prefill_tokens
        for job in list(self.running):
            if job.row is None or not self._fit(job, job.row):
                continue
            if job.is_new and not self._share(job, job.row):
                continue
            pending = len(job.ids) - job.row.computed
            count = 1 if pending == 1 else min(pending, budget)
            if count:
                pieces.append(SequenceChunk(job.row, count))
                budget -= count if pending > 1 else 0
        return pieces

    def finish(self, job: ScheduledRequest) -> None:
        """Take a request out, wherever it is; its session keeps the row."""
        if job.row is None:
            self.waiting.remove(job)
            return
        self.running.remove(job)
        row, job.row = job.row, None
        self._uses += 1
        row.in_use, row.last_used = False, self._uses
        if row.session_id is None:
            self.rows.give_back(row)

    def end_session(self, session_id: str) -> None:
        """Give back a session's row; a request that runs in it keeps it to its end."""
        row = self._sessions.pop(session_id, None)
        if row is None:
            return
        row.session_id = None
        if not row.in_use:
            self.rows.give_back(row)

    def forget_computed(self) -> None:
        """Drop all keys and values; running requests compute theirs again."""
        for session_id in [name for name, row in self._sessions.items() if not row.in_use]:
            self.end_session(session_id)
        for job in self.running:
            if job.row is not None:
                job.row.computed, job.is_new = 0, True

    def reset(self) -> None:
        """Forget all sessions and the memory of the cache, when nothing runs any more."""
        for session_id in list(self._sessions):
            self.end_session(session_id)
        self.rows.clear()

    def _place(self, job: ScheduledRequest) -> bool:
        """Give a waiting request its session's row or a new one; ``False`` when there is no room yet."""
        session_id = job.request.session_id
        row = self._sessions.get(session_id)
        if row is None or row.in_use or row.adapter != job.request.adapter:
            if not self._make_room(len(job.ids) + ANSWER_ROOM):
                return False
            shared, row = row, self.rows.take(len(job.ids) + ANSWER_ROOM)
            row.adapter = job.request.adapter
            job.is_new = True
            if shared is None:
                row.session_id = session_id
                self._sessions[session_id] = row
        else:
            row.in_use = True
            row.computed = min(common_prefix(row.ids[: row.computed], job.ids), len(job.ids) - 1)
            row.computed = common_tokens(row.computed, row.images, job.request.images)
        if job.admitted is None:
            job.admitted, job.cached_tokens = time.perf_counter(), row.computed
        row.ids, row.images, job.row = job.ids, job.request.images, row
        return True

    def _share(self, job: ScheduledRequest, row: CacheRow) -> bool:
        """Copy to a new row what others have computed of its beginning; ``False`` while one is about to compute it."""
        best, most = None, FEWEST_SHARED - 1
        last = len(job.ids) - 1
        for other, known in self._rows_before(job):
            if min(known, last) > most and other.ids[most] == job.ids[most]:
                shared = min(common_prefix(other.ids, job.ids), known, last)
                if other.images or row.images:
                    shared = common_tokens(shared, other.images, row.images)
                if shared > most:
                    best, most = other, shared
        if best is not None and best.computed < most:
            return False
        job.is_new = False
        if best is not None:
            best.block.copy_row(best.index, row.block, row.index, most)
            row.computed, row.routed_experts = most, best.routed_experts[:most]
            if not job.num_sampled:
                job.cached_tokens = most
        return True

    def _rows_before(self, job: ScheduledRequest) -> Iterator[tuple[CacheRow, int]]:
        """Rows of the same adapter: of requests that were admitted before `job`, and of idle sessions, with what they
        hold or will.
        """
        for other in self.running:
            if other is job:
                break
            if other.row is not None and other.request.adapter == job.request.adapter:
                yield other.row, len(other.ids)
        idle = (row for row in self._sessions.values() if not row.in_use and row.adapter == job.request.adapter)
        yield from ((row, row.computed) for row in idle)

    def _fit(self, job: ScheduledRequest, row: CacheRow) -> bool:
        """Make the row large enough for the job's tokens; ``False`` when the job had to give it up."""
        length = len(job.ids)
        if length <= row.block.capacity:
            return True
        while not self._make_room(length, instead_of=row):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is job:
                return False
        self.rows.move(row, length)
        return True

    def _make_room(self, length: int, *, instead_of: CacheRow | None = None) -> bool:
        while not self.rows.has_room(length, instead_of=instead_of):
            victim = self._least_useful_session()
            if victim is None:
                return False
            self.evictions += 1
            self.end_session(victim)
        return True

    def _least_useful_session(self) -> str | None:
        """Return the idle session that is needed last: least recently used, or else last in the queue."""
        queued = {job.request.session_id: place for place, job in enumerate(self.waiting)}
        idle = [(name, row) for name, row in self._sessions.items() if not row.in_use]
        if not idle:
            return None
        return min(idle, key=lambda item: (item[0] in queued, -queued.get(item[0], 0), item[1].last_used))[0]

    def _preempt(self, job: ScheduledRequest) -> None:
        self.preemptions += 1
        self.running.remove(job)
        row, job.row = job.row, None
        if row is not None:
            if row.session_id is not None:
                del self._sessions[row.session_id]
            self.rows.give_back(row)
        self.waiting.appendleft(job)


TOKEN_COST = 24
"""Cached tokens whose attention costs as much as taking one new token through the model, for small models."""


def split_pieces(pieces: Sequence[SequenceChunk], lanes: int) -> list[list[SequenceChunk]]:
    """Neighbouring pieces in as many parts as are worth it, of about the same cost."""
    count = max(1, min(lanes, len(pieces) // FEWEST_PER_LANE))
    if count == 1:
        return [list(pieces)]
    ordered = sorted(pieces, key=lambda piece: (piece.row.block.capacity, piece.row.index))
    costs = [piece.count * TOKEN_COST + piece.end for piece in ordered]
    share, spent = sum(costs) / count, 0.0
    parts: list[list[SequenceChunk]] = [[] for _ in range(count)]
    for piece, cost in zip(ordered, costs, strict=True):
        parts[min(int((spent + cost / 2) / share), count - 1)].append(piece)
        spent += cost
    return [part for part in parts if part]
