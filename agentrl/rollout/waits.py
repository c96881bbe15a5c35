"""Wait tracking: waits of a run are registered, timed, and reported when nothing makes progress.

A run has one table of waits. The event loop registers waits; a thread reads them, so that it can also report what
blocks the event loop.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType

_log = logging.getLogger(__name__)


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
    TRAINER = "trainer"
    COLLECTIVE = "collective"
    """Trainer with several processes, which wait for each other."""
    SYNC = "sync"
    """Weight sync and its verification."""
    DISK = "disk"
    EXTRAS = "extras"
    """Extra rollouts of a group, or a served teacher."""
    LOOP = "loop"
    """Agent loop; listed only while its episode waits for nothing else."""
    TOOLSET = "toolset"
    """Toolset that lists its tools."""
    GROUP_SCORER = "group_scorer"
    SESSION_END = "end_session"
    """Engine that ends an episode's sessions."""


AT_WORK = frozenset({WaitKind.ENVIRONMENT, WaitKind.TOOL, WaitKind.TOOLSET, WaitKind.SCORER, WaitKind.GROUP_SCORER})
"""Waits that do not depend on the engine."""

MEASURED = (
    WaitKind.ENGINE,
    WaitKind.ENVIRONMENT,
    WaitKind.TOOL,
    WaitKind.SCORER,
    WaitKind.GROUP_SCORER,
    WaitKind.CAPACITY,
    WaitKind.GROUPS,
)
"""Waits whose seconds are metrics of a step; other waits are phases of a step, or contain these waits."""

_STOP = "Ctrl-C, and a second one if the run does not stop"
REMEDIES: Mapping[WaitKind, str] = {
    WaitKind.ENGINE: "engine.timeout_s",
    WaitKind.ENVIRONMENT: "environment.step_timeout_s; environment.isolation=process if its code cannot be interrupted",
    WaitKind.TOOL: "agent.tool_timeout_s",
    WaitKind.SCORER: "the deadline of the reward function or judge",
    WaitKind.CAPACITY: "an episode or call ending, or a higher limit",
    WaitKind.GROUPS: "episodes ending",
    WaitKind.TRAINER: _STOP,
    WaitKind.COLLECTIVE: f"the slowest rank (see logs/rank-N.log), or {_STOP}",
    WaitKind.SYNC: f"servers that answer (see logs), or {_STOP}",
    WaitKind.DISK: "a file system that responds",
    WaitKind.EXTRAS: "the rollout or teacher finishing",
    WaitKind.LOOP: "agent.max_seconds, or a deadline in the agent loop",
    WaitKind.TOOLSET: "a tool server that answers",
    WaitKind.GROUP_SCORER: "the deadline of the reward function or judge",
    WaitKind.SESSION_END: "an engine that answers",
}
"""Config keys or actions that end waits."""

LOOP_PING_S = 1.0
"""Interval in seconds of the checks whether the event loop is blocked."""


@dataclass(slots=True)
class Wait:
    """Context manager of one wait; `seconds` is set when it ends."""

    table: WaitTracker = field(repr=False)
    kind: WaitKind
    who: str
    what: str
    deadline_s: float | None = None
    remedy: str | None = None
    """Config key or action that ends the wait, in place of the kind's."""
    began: float = 0.0
    seconds: float = 0.0

    @property
    def unblocked_by(self) -> str:
        """Config key or action that ends the wait."""
        return self.remedy or REMEDIES[self.kind]

    def __enter__(self) -> Wait:
        self.began = self.table.clock()
        self.table.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = self.table.clock() - self.began
        self.table.end(self)


class EngineUse:
    """Use of the engine's capacity over time, from the waits of episodes.

    The engine can sample ``slots`` answers at once. While it samples a answers and b episodes are in tools or
    environments, a second counts as a / slots seconds of use, and as up to b / slots seconds lost to tools and
    environments.
    """

    def __init__(self, began: float) -> None:
        self.slots = 1
        """Number of answers that the engine samples at once when it is fully used."""
        self._asking = 0
        self._elsewhere: Counter[str] = Counter()
        """Number of waits outside the engine, by episode."""
        self._since = began
        self._used_s = self._elsewhere_s = 0.0

    def change(self, kind: WaitKind, who: str, now: float, by: int) -> None:
        """Note that a wait began (`by` is 1) or ended (-1)."""
        if kind is WaitKind.ENGINE:
            self._advance(now)
            self._asking += by
        elif kind in AT_WORK:
            self._advance(now)
            self._elsewhere[who] += by
            if not self._elsewhere[who]:
                del self._elsewhere[who]

    def _advance(self, now: float) -> None:
        seconds, self._since = now - self._since, now
        asking = min(self._asking, self.slots)
        self._used_s += seconds * asking / self.slots
        self._elsewhere_s += seconds * min(len(self._elsewhere), self.slots - asking) / self.slots

    def read(self, now: float) -> EngineSeconds:
        """Return the seconds until now."""
        self._advance(now)
        return EngineSeconds(whole=now, used=self._used_s, elsewhere=self._elsewhere_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSeconds:
    """Seconds of an engine; differences of two readings of `EngineUse` are those between them.

    Example: 4 slots, 10 s with 2 answers and one episode in a tool: ``whole=10, used=5, elsewhere=2.5``.
    """

    whole: float
    used: float
    elsewhere: float
    """Seconds lost because episodes were in their tools, environments or scorers."""

    def __sub__(self, other: EngineSeconds) -> EngineSeconds:
        """Return the seconds between two readings."""
        return EngineSeconds(
            whole=self.whole - other.whole, used=self.used - other.used, elsewhere=self.elsewhere - other.elsewhere
        )

    @property
    def empty(self) -> float:
        """Seconds lost because there were not enough episodes."""
        return self.whole - self.used - self.elsewhere


class WaitTracker:
    """Table of all current waits, and the seconds spent waiting so far. Only the event loop's thread changes it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.engine_use = EngineUse(clock())
        self.seconds: defaultdict[WaitKind, float] = defaultdict(float)
        """Seconds waited by kind, summed over episodes."""
        self.changes = 0
        """Number of waits that began plus waits that ended."""
        self.listeners: list[Callable[[Wait], None]] = []
        """Called with each wait that has ended."""
        self._changed = asyncio.Event()
        self._open: dict[int, Wait] = {}
        self._latest: Wait | None = None
        """Wait that began last, if none has ended since."""
        self._last_progress = clock()
        self._last_report = self._last_progress

    def on(
        self, kind: WaitKind, who: str, what: str, deadline_s: float | None = None, remedy: str | None = None
    ) -> Wait:
        """Return a context manager around one wait: `who` waits for `what`, for at most `deadline_s` seconds."""
        return Wait(self, kind, who, what, deadline_s, remedy)

    def begin(self, wait: Wait) -> None:
        """Register a wait."""
        if not self._open:
            self._last_progress = wait.began
        self._open[id(wait)] = self._latest = wait
        self.engine_use.change(wait.kind, wait.who, wait.began, 1)
        self._note_change()

    def end(self, wait: Wait) -> None:
        """Remove a wait that has ended, which counts as progress."""
        del self._open[id(wait)]
        self._latest = None
        self.seconds[wait.kind] += wait.seconds
        self._last_progress = wait.began + wait.seconds
        self.engine_use.change(wait.kind, wait.who, self._last_progress, -1)
        self._note_change()
        for listener in self.listeners:
            listener(wait)

    async def wait_for_episodes(self) -> None:
        """Wait until no episode works outside the engine: in its environment, in a tool or in its scorer.

        An episode whose tool or environment waits for the engine (a tool that lets the policy answer) does not count.
        """
        while self._working_episodes():
            self._changed.clear()
            await self._changed.wait()

    def _working_episodes(self) -> set[str]:
        asking = {wait.who for wait in self._open.values() if wait.kind is WaitKind.ENGINE}
        return {wait.who for wait in self._open.values() if wait.kind in AT_WORK} - asking

    def _note_change(self) -> None:
        self.changes += 1
        self._changed.set()

    @property
    def latest(self) -> Wait | None:
        """The wait that began last, if none has ended since; if the event loop is blocked, its code is the cause."""
        return self._latest

    def stall_report(self, silence_s: float, *, blocked: str = "") -> str | None:
        """Return the table of waits if nothing has made progress for `silence_s` seconds; repeat it after each such
        interval.

        Args:
            silence_s: Seconds.
            blocked: First line if the event loop is blocked, which is a stall even if no waits are registered.
        """
        now = self.clock()
        waits = self.list_waits()
        quiet_since = max(self._last_progress, self._last_report)
        if not (waits or blocked) or now - quiet_since < silence_s:
            return None
        self._last_report = now
        lines = [blocked] if blocked else []
        return "\n".join([*lines, *self._table(waits, now)])

    def list_waits(self) -> list[Wait]:
        """Return the current waits, oldest first; a wait for an agent loop only if its episode has no other wait.

        May be called from any thread.
        """
        waits = list(self._open.values())  # a copy, because the event loop continues
        busy = {wait.who for wait in waits if wait.kind is not WaitKind.LOOP}
        return [wait for wait in waits if wait.kind is not WaitKind.LOOP or wait.who not in busy]

    def _table(self, listed: list[Wait], now: float) -> list[str]:
        rows: defaultdict[tuple[WaitKind, str], list[Wait]] = defaultdict(list)
        for wait in listed:
            rows[wait.kind, wait.what].append(wait)
        lines = [f"no progress for {now - self._last_progress:.0f} s; {len(listed)} waiting:"] if listed else []
        for (kind, what), same in sorted(rows.items(), key=lambda row: -len(row[1])):
            oldest = min(same, key=lambda wait: wait.began)
            limit = "no deadline" if oldest.deadline_s is None else f"deadline {oldest.deadline_s:g} s"
            lines.append(
                f"  {len(same):5d}  {kind:<12} {what}; longest {now - oldest.began:.0f} s ({limit}): {oldest.who}; "
                f"unblocked by {oldest.unblocked_by}"
            )
        return lines

    @contextmanager
    def report_stalls(self, silence_s: float, report: Callable[[str], None]) -> Iterator[StallWatch]:
        """Report stalls of the running event loop in this block; yield the watchdog.

        `report` is called in the event loop, or in a thread if the event loop is blocked.
        """
        watch = StallWatch(self, silence_s, report)
        watch.start()
        try:
            yield watch
        finally:
            watch.stop()


@dataclass(frozen=True, slots=True)
class BlockedCode:
    """Code that blocks the event loop, and for how long."""

    seconds: float
    by: str
    """The latest wait or the running task, with the line that runs."""


class StallWatch:
    """Watchdog thread that reports stalls of the event loop that created it, even if that loop is blocked.

    Code that blocks the event loop and holds the interpreter lock also blocks this thread.
    """

    def __init__(self, waits: WaitTracker, silence_s: float, report: Callable[[str], None]) -> None:
        self._waits, self._silence_s, self._report = waits, silence_s, report
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._ended = threading.Event()
        self._answered, self._is_asked = waits.clock(), False

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="stall watch", daemon=True).start()

    def stop(self) -> None:
        """End the thread, without waiting."""
        self._ended.set()

    def _run(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            while not self._ended.wait(min(self._silence_s / 4, LOOP_PING_S)):
                self.look()

    def look(self) -> None:
        """Report a stall if there is one, and schedule a heartbeat in the event loop."""
        found = self.find_blocking_code(self._silence_s / 2)
        blocked = "" if found is None else f"the event loop has been blocked for {found.seconds:.0f} s by {found.by}"
        text = self._waits.stall_report(self._silence_s, blocked=blocked)
        if text is not None and found is not None:
            self._deliver(text)
        elif text is not None:
            self._loop.call_soon_threadsafe(self._deliver, text)
        if not self._is_asked:
            self._is_asked = True
            self._loop.call_soon_threadsafe(self._answer)

    def find_blocking_code(self, min_s: float = 2 * LOOP_PING_S) -> BlockedCode | None:
        """Return what has blocked the event loop for more than `min_s` seconds; may be called from any thread."""
        blocked_s = self._waits.clock() - self._answered
        return BlockedCode(blocked_s, self._blocker()) if self._is_asked and blocked_s > min_s else None

    def _answer(self) -> None:
        self._answered, self._is_asked = self._waits.clock(), False

    def _deliver(self, text: str) -> None:
        try:
            self._report(text)
        except Exception:
            _log.exception("a stall report could not be shown:\n%s", text)

    def _blocker(self) -> str:
        """Describe the wait or task that blocks the event loop, with the line that runs."""
        task, latest = asyncio.current_task(self._loop), self._waits.latest
        name = latest.what if latest is not None else "a callback" if task is None else task.get_name()
        frame = sys._current_frames().get(self._loop_thread)
        return name if frame is None else f"{name} ({frame.f_code.co_filename} line {frame.f_lineno})"
