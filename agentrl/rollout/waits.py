"""Waits of the runtime, which are registered, timed, and reported when nothing progresses; counters of the rollout."""

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
    """Waiting for a free slot: of an episode, an environment or a tool."""
    GROUPS = "groups"
    """Trainer waiting for finished groups."""


AT_WORK = frozenset({WaitKind.ENVIRONMENT, WaitKind.TOOL, WaitKind.SCORER})
"""Waits that do not depend on the engine."""


@dataclass(slots=True)
class Wait:
    """Context manager of one wait; `seconds` is set when it ends."""

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
    """Table of all current waits, and the seconds spent waiting so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.seconds: defaultdict[WaitKind, float] = defaultdict(float)
        """Seconds waited by kind, summed over episodes."""
        self.changes = 0
        """Number of waits that began plus waits that ended."""
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
        """Remove a wait that has ended, which counts as progress."""
        del self._open[id(wait)]
        self.seconds[wait.kind] += wait.seconds
        self._last_progress = wait.began + wait.seconds
        self._note_change()

    async def wait_for_callers(self) -> None:
        """Wait until no episode works outside the engine: in its environment, in a tool or in its scorer.

        An episode whose tool or environment waits for the engine (a tool that lets the policy answer) does not count.
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
        """Return the table if nothing has progressed for `silence_s` seconds, and again after the same time."""
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
        lines = [f"no progress for {now - self._last_progress:.0f} s; {len(self._open)} waiting:"]
        for (kind, what), waits in sorted(rows.items(), key=lambda row: -len(row[1])):
            oldest = min(waits, key=lambda wait: wait.began)
            lines.append(
                f"  {len(waits):5d}  {kind:<12} {what}; longest {now - oldest.began:.0f} s: {oldest.who}",
            )
        return "\n".join(lines)

    @asynccontextmanager
    async def report_stalls(self, silence_s: float, report: Callable[[str], None]) -> AsyncIterator[None]:
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
    """Observer of the events of episodes; the default does nothing.

    The event loop calls it, so methods must be quick. They may raise only `AgentRLError`; a `UsageError` (a full disk)
    ends the episode and reaches the caller of the runner.
    """

    def on_start(self, trajectory: Trajectory) -> None:
        """Handle the start of an attempt; the trajectory is empty."""

    def on_turn(self, trajectory: Trajectory, turn: Turn) -> None:
        """Handle a complete turn, whose reward and timings are final."""

    def on_end(self, trajectory: Trajectory) -> None:
        """Handle the end of an attempt with any outcome, also of one that is retried or cancelled."""


@dataclass(slots=True, kw_only=True)
class RolloutCounters:
    """Counts of a rollout, which can be read at any time."""

    running: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    retries: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    """Number of tokens sent to the engine, including repeated prefixes."""
    answer_tokens: int = 0
    """Number of sampled or forced tokens."""
    invalid_answers: int = 0
    invalid_actions: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    groups_delivered: int = 0
    groups_failed: int = 0
    """Number of groups with too few trainable episodes or a failed extra rollout."""
    groups_stale: int = 0
    groups_filtered: int = 0
    judge_requests: int = 0
    """Number of answers of a judge's service."""
    judge_cached: int = 0
    """Number of verdicts that were cached, or that another episode had already requested."""
    judge_unreadable: int = 0
    """Number of answers that could not be read."""
    judge_tokens: int = 0
    """Number of tokens of questions and answers."""
    judge_without: int = 0
    """Number of episodes with only the environment's reward because the budget was spent."""
    judge_pairs: int = 0
    """Number of pairs of episodes that were compared in both orders."""
    judge_agreeing: int = 0
    """Number of pairs with the same winner, or a tie, in both orders."""
    judge_cost: float = 0.0
    """Cost by the prices in ``agent.judge.budget``."""
    judge_seconds: float = 0.0
    """Seconds summed over requests."""
    incidents: Incidents = field(default_factory=Incidents)
    """Failures and their places."""

    def progress(self) -> RolloutProgress:
        """Return the current counts of episodes, turns and tokens."""
        return RolloutProgress(episodes=self.running, turns=self.turns, tokens=self.answer_tokens)

    def snapshot(self) -> dict[str, float]:
        """Return all counts by metric name."""
        counts = {name: float(getattr(self, name)) for name in self.__slots__ if name not in ("outcomes", "incidents")}
        return counts | {f"outcome/{outcome}": float(count) for outcome, count in self.outcomes.items()}


@contextmanager
def settled_heap() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collections while the block runs.

    Libraries and models consist of hundreds of thousands of objects. A full collection visits each of them and stops
    the event loop for so long that inference servers run out of requests. Nested blocks have no effect.
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
