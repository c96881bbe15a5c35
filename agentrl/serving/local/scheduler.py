"""Scheduler of the local engine: decides which requests run, in which cache rows, and what they compute next.

The schedule does not depend on time: the same requests, aborts and updates in the same order give the same schedule.

Requests wait in order of arrival (`waiting`), run up to `max_num_seqs` at a time (`running`), and leave their row to
their session for its next turn. A row is evicted from an idle session when others need its memory, and from the latest
admitted request when earlier ones need to grow; that request then waits at the front of the queue and recomputes its
keys and values.

A shared prefix is computed once: a new row copies it from another row, and waits if that row is about to compute it.
The prompt of a group, a common system message, and the history before a branch are thus computed once.

Drafts are guesses of the next tokens of a sequence, from its earlier tokens (prompt lookup). Agents repeat themselves:
the syntax of a tool call, names of files, an observation that is quoted. A draft is what followed the last occurrence
of the sequence's latest tokens. The engine computes the draft in the same forward pass as the token before it, and
samples at each position with the random number that this position has anyway. Tokens are accepted as long as the
sampled one equals the guessed one, so answers are those of decoding one token at a time, up to rounding (Leviathan et
al.: Fast inference from transformers via speculative decoding, 2023, with a draft that has all the probability).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from agentrl.config.engines import MIN_SEQS_PER_LANE
from agentrl.engine import GenerateRequest, Generation, StopReason
from agentrl.message.image import common_tokens
from agentrl.models.routed_experts import RoutedExperts
from agentrl.serving.local.cache import CacheRow, RowStore
from agentrl.serving.local.forward import SequenceChunk
from agentrl.serving.request import common_prefix

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Function that converts token ids to text."""
PIECES_OF_A_CHARACTER = 4
"""Maximum tokens per character: the bytes of a UTF-8 character."""
MIN_COPIED_TOKENS = 16
"""Minimum length of a prefix that is copied from, or awaited in, another row."""
ANSWER_ROOM = 32
"""Answer tokens for which a new row has room; longer answers move to a larger row."""
TOKEN_COST = 24
"""Number of cached tokens whose attention costs as much as one new token, in small models."""
MATCHED = (4, 3, 2)
"""Numbers of latest tokens whose earlier occurrence is looked up, one after another."""
WINDOW_TOKENS = 512
"""Number of guessed tokens after which their acceptance is judged."""
MIN_ACCEPTANCE = 0.35
"""Share of guessed tokens below which guessing pauses."""
PAUSE_TOKENS = 8192
"""Number of sampled tokens for which guessing pauses."""


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """Request in the scheduler, with its answer so far."""

    request: GenerateRequest
    future: asyncio.Future[Generation]
    seed: int
    ids: list[int]
    """Prompt and tokens sampled so far."""
    text: str = ""
    """First ids, one character each, in which drafts are looked up."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    """Routed experts of the tokens from the request's `routed_experts_from` on, as first computed."""
    row: CacheRow | None = None
    """Cache row; ``None`` while the request waits."""
    is_new: bool = False
    """True if the row is new and empty."""
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
        """Record the routed experts of newly computed tokens."""
        if self.request.routed_experts_from is not None:
            self.routed_experts += row.routed_experts[self.request.routed_experts_from + len(self.routed_experts) :]

    def stop_reason(self, max_context: int, decode: Decode | None = None) -> StopReason | None:
        """Return why sampling ends after the latest token; ``None`` if it continues. Stop texts require `decode`."""
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
        """Return the answer sampled so far."""
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
    """Scheduler of up to `max_num_seqs` running requests, in steps of at most `prefill_tokens` prompt tokens in all.

    A running request guesses up to `draft_tokens` tokens per step.
    """

    def __init__(self, *, max_num_seqs: int, prefill_tokens: int, rows: RowStore, draft_tokens: int = 0) -> None:
        self.max_num_seqs = max_num_seqs
        self.prefill_tokens = prefill_tokens
        self.rows = rows
        self.draft_tokens = draft_tokens
        self.drafts = DraftGate()
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
        """Sort the queue by request id, so that the schedule does not depend on the order of arrival."""
        self.waiting = deque(sorted(self.waiting, key=lambda job: job.request.request_id))

    def plan(self) -> list[SequenceChunk]:
        """Admit requests that fit, and return what each running request computes next."""
        while self.waiting and len(self.running) < self.max_num_seqs and self._place(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        chunks = []
        budget = self.prefill_tokens
        for job in list(self.running):
            if job.row is None or not self._fit(job, job.row):
                continue
            if job.is_new and not self._share(job, job.row):
                continue
            pending = len(job.ids) - job.row.computed
            if pending == 1:
                draft = self._draft(job, job.row)
                chunks.append(SequenceChunk(job.row, 1 + len(draft), draft))
            elif count := min(pending, budget):
                chunks.append(SequenceChunk(job.row, count))
                budget -= count
        return chunks

    def _draft(self, job: ScheduledRequest, row: CacheRow) -> Sequence[int]:
        """Return guesses of the next tokens, which fit into the row."""
        most = min(self.draft_tokens, row.block.capacity - len(job.ids))
        if most < 1 or not self.drafts.is_open or row.images or job.request.routed_experts_from is not None:
            return ()
        job.text += "".join(map(chr, job.ids[len(job.text) :]))
        return look_up(job.text, most)

    def finish(self, job: ScheduledRequest) -> None:
        """Remove a waiting or running request; its session keeps the row."""
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
        """Release a session's row; a running request keeps it until it finishes."""
        row = self._sessions.pop(session_id, None)
        if row is None:
            return
        row.session_id = None
        if not row.in_use:
            self.rows.give_back(row)

    def forget_computed(self) -> None:
        """Discard all keys and values, because the weights have changed; running requests recompute theirs."""
        self.drafts.restart()
        for session_id in [name for name, row in self._sessions.items() if not row.in_use]:
            self.end_session(session_id)
        for job in self.running:
            if job.row is not None:
                job.row.keep(0)
                job.is_new = True

    def reset(self) -> None:
        """Remove all sessions and free the cache; no request may be running."""
        for session_id in list(self._sessions):
            self.end_session(session_id)
        self.rows.clear()

    def _place(self, job: ScheduledRequest) -> bool:
        """Give a waiting request its session's row or a new one; returns False if no memory is available yet."""
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
            known = min(common_prefix(row.ids[: row.computed], job.ids), len(job.ids) - 1)
            row.keep(common_tokens(known, row.images, job.request.images))
        if job.admitted is None:
            job.admitted, job.cached_tokens = time.perf_counter(), row.computed
        row.ids, row.images, job.row = job.ids, job.request.images, row
        return True

    def _share(self, job: ScheduledRequest, row: CacheRow) -> bool:
        """Copy the longest computed prefix from another row; returns False while that row is about to compute it."""
        best, most = None, MIN_COPIED_TOKENS - 1
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
            row.copy_prefix(best, most)
            if not job.num_sampled:
                job.cached_tokens = most
        return True

    def _rows_before(self, job: ScheduledRequest) -> Iterator[tuple[CacheRow, int]]:
        """Yield rows of the same adapter, with the number of tokens that they hold or will hold.

        These are the rows of requests that were admitted before `job`, and of idle sessions.
        """
        for other in self.running:
            if other is job:
                break
            if other.row is not None and other.request.adapter == job.request.adapter:
                yield other.row, len(other.ids)
        idle = (row for row in self._sessions.values() if not row.in_use and row.adapter == job.request.adapter)
        yield from ((row, row.computed) for row in idle)

    def _fit(self, job: ScheduledRequest, row: CacheRow) -> bool:
        """Make the row large enough for the request's tokens; returns False if the request was preempted."""
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
        """Return the idle session to evict: the least recently used one not in the queue, else the last one in it."""
        queued = {job.request.session_id: index for index, job in enumerate(self.waiting)}
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


def split_chunks(chunks: Sequence[SequenceChunk], lanes: int) -> list[list[SequenceChunk]]:
    """Split chunks into parts of similar cost for at most `lanes` threads, `MIN_SEQS_PER_LANE` chunks or more each."""
    count = max(1, min(lanes, len(chunks) // MIN_SEQS_PER_LANE))
    if count == 1:
        return [list(chunks)]
    ordered = sorted(chunks, key=lambda chunk: (chunk.row.block.capacity, chunk.row.index))
    costs = [chunk.count * TOKEN_COST + chunk.end for chunk in ordered]
    share, spent = sum(costs) / count, 0.0
    parts: list[list[SequenceChunk]] = [[] for _ in range(count)]
    for chunk, cost in zip(ordered, costs, strict=True):
        parts[min(int((spent + cost / 2) / share), count - 1)].append(chunk)
        spent += cost
    return [part for part in parts if part]


def look_up(text: str, most: int) -> list[int]:
    """Return at most `most` tokens that followed the last earlier occurrence of a sequence's latest tokens.

    Args:
        text: The sequence, as one character per token id.
        most: Maximum number of tokens.
    """
    for size in MATCHED:
        found = text.rfind(text[-size:], 0, len(text) - 1)
        if found >= 0:
            return [ord(character) for character in text[found + size : found + size + most]]
    return []


@dataclass(slots=True)
class DraftGate:
    """Decides whether guessing pays, by the share of guessed tokens that was accepted.

    A rejected token costs a token's computation. Decisions depend on the tokens alone, and start anew with new weights,
    so that runs are reproducible.
    """

    drafted: int = 0
    """Number of guessed tokens."""
    accepted: int = 0
    """Number of guessed tokens that were sampled."""
    _window_drafted: int = 0
    _window_accepted: int = 0
    _pause: int = 0

    @property
    def is_open(self) -> bool:
        """True if tokens are guessed now."""
        return self._pause <= 0

    def record(self, drafted: int, accepted: int, sampled: int) -> None:
        """Record one answer's part in a step: its guessed, accepted and sampled tokens."""
        self._pause -= sampled
        self.drafted += drafted
        self.accepted += accepted
        self._window_drafted += drafted
        self._window_accepted += accepted
        if self._window_drafted >= WINDOW_TOKENS:
            if self._window_accepted < MIN_ACCEPTANCE * self._window_drafted:
                self._pause = PAUSE_TOKENS
            self._window_drafted = self._window_accepted = 0

    def restart(self) -> None:
        """Judge from the beginning, because the weights have changed."""
        self._window_drafted = self._window_accepted = self._pause = 0
