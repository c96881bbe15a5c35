"""Waits of the runtime: every await is registered, timed, and reported when nothing moves; counters of the rollout."""

from __future__ import annotations

import asyncio
import enum
import gc
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from agentrl.errors import Outcome
from agentrl.observe.incidents import Incidents
from agentrl.observe.progress import RolloutProgress
from agentrl.trajectory import Trajectory, Turn


class WaitKind(enum.StrEnum):
    """Kinds of waits."""

    ENGINE = "engine"
    ENVIRONMENT = "environment"
    TOOL = "tool"
    SCORER = "scorer"
    CAPACITY = "capacity"
    """A free place: for an episode, or for an environment."""
    GROUPS = "groups"
    """Finished groups: the trainer waits for episodes."""


AT_WORK = frozenset({WaitKind.ENVIRONMENT, WaitKind.TOOL, WaitKind.SCORER})
"""Waits that end without the engine."""


@dataclass(slots=True)
class Wait:
    """One wait; a context manager. `seconds` is right once it has ended."""

    table: WaitTracker = field(repr=False)
    kind: WaitKind
    who: str
    what: str
    began: float = 0.0
    seconds: float = 0.0

    def __enter__(self) -> Wait:
        self.began = self.table.clock()
        self.table.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = self.table.clock() - self.began
        self.table.end(self)


class WaitTracker:
    """The table of everything that is waited for now, and the seconds spent waiting so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.seconds: defaultdict[WaitKind, float] = defaultdict(float)
        """Seconds waited by kind, summed over episodes."""
        self.changes = 0
        """Grows with every wait that begins or ends."""
        self._changed = asyncio.Event()
        self._open: dict[int, Wait] = {}
        self._last_progress = clock()
        self._last_report = self._last_progress

    def on(self, kind: WaitKind, who: str, what: str) -> Wait:
        """Return a context manager around one wait: `who` waits for `what`."""
        return Wait(self, kind, who, what)

    def begin(self, wait: Wait) -> None:
        """Register a wait."""
        if not self._open:
            self._last_progress = wait.began
        self._open[id(wait)] = wait
        self._note_change()

    def end(self, wait: Wait) -> None:
        """Remove a wait: something moved."""
        del self._open[id(wait)]
        self.seconds[wait.kind] += wait.seconds
        self._last_progress = wait.began + wait.seconds
        self._note_change()

    async def all_callers(self) -> None:
        """Wait until no episode is at work outside the engine: in its environment, in a tool, in its scorer.

        One that asks the engine from there (a tool that lets the policy answer) does not count: it waits for the
        engine itself.
        """
        while self._outside():
            self._changed.clear()
            await self._changed.wait()

    def _outside(self) -> set[str]:
        asking = {wait.who for wait in self._open.values() if wait.kind is WaitKind.ENGINE}
        return {wait.who for wait in self._open.values() if wait.kind in AT_WORK} - asking

    def _note_change(self) -> None:
        self.changes += 1
        self._changed.set()

    def stall_report(self, silence_s: float) -> str | None:
        """Return the table when nothing has moved for `silence_s`; again only after as much more silence."""
        now = self.clock()
        quiet_since = max(self._last_progress, self._last_report)
        if not self._open or now - quiet_since < silence_s:
            return None
        self._last_report = now
        return self._table(now)

    def _table(self, now: float) -> str:
        rows: defaultdict[tuple[WaitKind, str], list[Wait]] = defaultdict(list)
        for wait in self._open.values():
            rows[wait.kind, wait.what].append(wait)
        lines = [f"nothing has moved for {now - self._last_progress:.0f} s; {len(self._open)} wait:"]
        for (kind, what), waits in sorted(rows.items(), key=lambda row: -len(row[1])):
            oldest = min(waits, key=lambda wait: wait.began)
            lines.append(
                f"  {len(waits):5d}  {kind:<12} {what}; longest {now - oldest.began:.0f} s: {oldest.who}",
            )
        return "\n".join(lines)

    @asynccontextmanager
    async def watched(self, silence_s: float, report: Callable[[str], None]) -> AsyncIterator[None]:
        """Report stalls while the block runs."""
        watch = asyncio.create_task(self.watch(silence_s, report), name="stall watch")
        try:
            yield
        finally:
            watch.cancel()

    async def watch(
        self,
        silence_s: float,
        report: Callable[[str], None],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Report stalls until cancelled."""
        while True:
            await sleep(silence_s / 4)
            text = self.stall_report(silence_s)
            if text is not None:
                report(text)


class RolloutObserver:
    """Receives the events of episodes; the default does nothing.

    Called in the event loop: be quick. What it raises must be an `AgentRLError`; a `UsageError` (a full disk) ends the
    episode and reaches the caller of the runner.
    """

    def on_start(self, trajectory: Trajectory) -> None:
        """An attempt begins; the trajectory is empty."""

    def on_turn(self, trajectory: Trajectory, turn: Turn) -> None:
        """A turn is complete: its reward and timings are final."""

    def on_end(self, trajectory: Trajectory) -> None:
        """An attempt ended, whatever its outcome (also one that is retried or cancelled)."""


@dataclass(slots=True, kw_only=True)
class RolloutCounters:
    """Running counts, readable at any time."""

    running: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    retries: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    """Tokens sent to the engine, repeated prefixes included."""
    answer_tokens: int = 0
    """Tokens sampled or forced."""
    invalid_answers: int = 0
    invalid_actions: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    groups_delivered: int = 0
    groups_failed: int = 0
    """Groups without a single episode that can train."""
    groups_stale: int = 0
    groups_filtered: int = 0
    judge_requests: int = 0
    """Answers of a judge's service."""
    judge_cached: int = 0
    """Verdicts that were known, or that another episode was already asking for."""
    judge_unreadable: int = 0
    """Answers that had to be asked again."""
    judge_tokens: int = 0
    """Tokens of questions and answers."""
    judge_without: int = 0
    """Episodes that the environment alone rewarded, because the budget was spent."""
    judge_pairs: int = 0
    """Pairs of episodes that were compared in both orders."""
    judge_agreeing: int = 0
    """Those of which both orders named the same winner, or both a tie."""
    judge_cost: float = 0.0
    """By the prices in ``agent.judge.budget``."""
    judge_seconds: float = 0.0
    """Summed over requests."""
    incidents: Incidents = field(default_factory=Incidents)
    """What failed, and where."""

    def playing(self) -> RolloutProgress:
        """Return what the episodes have come to by now."""
        return RolloutProgress(episodes=self.running, turns=self.turns, tokens=self.answer_tokens)

    def snapshot(self) -> dict[str, float]:
        """Return all counts by metric name."""
        counts = {name: float(getattr(self, name)) for name in self.__slots__ if name not in ("outcomes", "incidents")}
        return counts | {f"outcome/{outcome}": float(count) for outcome, count in self.outcomes.items()}


@contextmanager
def settled_heap() -> Iterator[None]:
    """Exclude everything that is alive now from garbage collections while the block runs.

    Libraries and models are hundreds of thousands of objects. A full collection looks at each of them and stops the
    event loop meanwhile, for long enough that servers run out of requests. Nested blocks change nothing.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
