"""Traces of episodes: their waits with kind, start and duration, as files, trees of spans, and a Chrome trace.

A run writes them with ``trackers=[trace]``: ``logs/trace/step-000012.jsonl`` has a line for each attempt that ended
during training step 12, and one for the step itself. `agentrl trace` converts a file for Perfetto.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError
from agentrl.observe.files import numbered_records, warn_damaged
from agentrl.observe.run_folder import step_name, step_of

SUFFIX = ".jsonl"
ENGINE, TOOL, DISK = "engine", "tool", "disk"
"""Kinds of spans that this module treats differently; see `agentrl.rollout.waits.WaitKind`."""
_AFTER_TURNS = frozenset({"scorer", "group_scorer", "end_session", DISK})
"""Kinds of spans that belong to the episode and not to its latest turn."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One wait of an episode or a run."""

    kind: str
    """Kind of the wait: ``engine``, ``tool``, ``environment``, ``scorer``, …"""
    what: str
    began: float
    """Seconds since 1970."""
    seconds: float

    @property
    def ended(self) -> float:
        """Seconds since 1970."""
        return self.began + self.seconds


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """Size and end of one answer."""

    prompt_tokens: int
    answer_tokens: int
    stop_reason: str
    role: str
    valid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeTrace:
    """Trace of one attempt at an episode, or of a training step."""

    name: str
    """Id of the episode; ``step`` of a training step."""
    step: int
    """Training step during which it ended."""
    began: float
    """Seconds since 1970."""
    seconds: float
    spans: Sequence[TraceSpan]
    turns: Sequence[TraceTurn] = ()
    environment: str = ""
    task: str = ""
    group: str = ""
    attempt: int = 0
    outcome: str | None = None
    is_failure: bool = False
    """True if the infrastructure failed."""
    error: str | None = None
    reward: float | None = None
    success: bool | None = None

    @property
    def ended(self) -> float:
        """Seconds since 1970."""
        return self.began + self.seconds

    def to_record(self) -> dict[str, Any]:
        """Return plain JSON types; `from_record` restores the trace."""
        record = {name: getattr(self, name) for name in _PLAIN}
        spans = [[span.kind, span.what, round(span.began, 6), round(span.seconds, 6)] for span in self.spans]
        turns = [[t.prompt_tokens, t.answer_tokens, t.stop_reason, t.role, t.valid] for t in self.turns]
        return {**record, "spans": spans, "turns": turns}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> EpisodeTrace:
        """Restore a trace.

        Raises:
            KeyError, TypeError: the record is damaged.
        """
        spans = [TraceSpan(*row) for row in record["spans"]]
        turns = [TraceTurn(*row) for row in record["turns"]]
        return cls(**{**record, "spans": spans, "turns": turns})


_PLAIN = tuple(one.name for one in fields(EpisodeTrace) if one.name not in ("spans", "turns"))


@dataclass(slots=True)
class SpanNode:
    """Span of a tree: an episode, its turns, and what they waited for."""

    kind: str
    """``episode``, ``turn``, or the kind of a `TraceSpan`."""
    name: str
    began: float
    """Seconds since 1970."""
    ended: float
    turn: TraceTurn | None = None
    """Answer of a turn, or of the engine's span."""
    children: list[SpanNode] = field(default_factory=list)


def span_tree(trace: EpisodeTrace) -> SpanNode:
    """Return the tree of an attempt.

    A turn begins with a request to the engine, and contains everything that begins before the next request; the episode
    itself contains what precedes the first turn, and the scoring.
    """
    root = SpanNode("episode", trace.name, trace.began, trace.ended)
    answers = iter(trace.turns)
    turn: SpanNode | None = None
    for span in sorted(trace.spans, key=lambda span: span.began):
        if span.kind == "loop":  # it contains the turns
            continue
        leaf = SpanNode(span.kind, span.what, span.began, span.ended)
        if span.kind == ENGINE:
            leaf.turn = next(answers, None)
            number = sum(child.kind == "turn" for child in root.children)
            turn = SpanNode("turn", f"turn {number}", span.began, span.ended, leaf.turn, [leaf])
            root.children.append(turn)
        elif turn is None or span.kind in _AFTER_TURNS:
            root.children.append(leaf)
        else:
            turn.children.append(leaf)
            turn.ended = max(turn.ended, leaf.ended)
        root.ended = max(root.ended, leaf.ended)
    return root


def trace_folder(run: Path) -> Path:
    """Return the folder of a run's traces."""
    return run / "logs" / "trace"


def traced_steps(run: Path) -> list[int]:
    """Return the training steps of a run that have a file of traces, in order."""
    files = trace_folder(run).glob(f"*{SUFFIX}")
    return sorted(step for file in files if (step := step_of(file.name, SUFFIX)) is not None)


def read_traces(run: Path, step: int) -> list[EpisodeTrace]:
    """Read the traces of a training step; damaged lines are skipped with a warning.

    Raises:
        UsageError: the run has no traces of this step.
    """
    file = trace_folder(run) / step_name(step, SUFFIX)
    if not file.is_file():
        known = traced_steps(run)
        raise UsageError(
            f"step {step} has not been traced in {run}",
            expected=f"a step from {known[0]} to {known[-1]}" if known else "a run with trackers=[trace]",
            hint=None if known else f"to trace its next steps: agentrl train --resume {run} 'trackers=[trace]'",
        )
    found, damaged = [], list[int]()
    for number, record in numbered_records(file, damaged):
        try:
            found.append(EpisodeTrace.from_record(record))
        except (KeyError, TypeError):
            damaged.append(number)
    warn_damaged(file, damaged)
    return found


def chrome_trace(traces: Iterable[EpisodeTrace]) -> dict[str, Any]:
    """Return traces in the Chrome trace event format, which Perfetto and ``chrome://tracing`` read.

    The process ``run`` has the phases of the step. In the process ``episodes``, a track shows episodes that run one
    after another; an episode's concurrent waits are on tracks below it.
    """
    ordered = sorted(traces, key=lambda trace: trace.began)
    begins = [began for trace in ordered for began in (trace.began, *(span.began for span in trace.spans))]
    start = min(begins, default=0.0)
    events = _Events(start)
    for trace in ordered:
        if trace.group:
            events.add_episode(trace)
        else:
            for span in trace.spans:
                events.add("run", span.kind, span.what, span.kind, span.began, span.ended, {})
    return {"traceEvents": events.list(), "displayTimeUnit": "ms"}


class _Events:
    """Trace events, with tracks on which no two events overlap unless one contains the other."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._events: list[dict[str, Any]] = []
        self._processes = {"run": 1, "episodes": 2}
        self._tracks: dict[tuple[str, str], int] = {}
        self._busy_until: list[float] = []
        """End of the latest episode on each track."""

    def add_episode(self, trace: EpisodeTrace) -> None:
        """Add an episode on the first free track."""
        root = span_tree(trace)
        place = next((i for i, end in enumerate(self._busy_until) if end <= root.began), len(self._busy_until))
        self._busy_until[place : place + 1] = [root.ended]
        details = {
            "episode": trace.name,
            "task": trace.task,
            "attempt": trace.attempt,
            "outcome": trace.outcome,
            "reward": trace.reward,
            "success": trace.success,
            "error": trace.error,
        }
        label = f"{trace.environment} {trace.task}"
        name = f"place {place:03d}"
        self.add("episodes", name, label, "episode", root.began, root.ended, details)
        below: list[float] = []
        for node in (found for child in root.children for found in _leaves(child)):
            level = next((i for i, end in enumerate(below) if end <= node.began), len(below))
            below[level : level + 1] = [node.ended]
            answer = {} if node.turn is None else asdict(node.turn)
            self.add("episodes", f"{name}.{level}", node.name, node.kind, node.began, node.ended, answer)

    def add(
        self, process: str, track: str, name: str, kind: str, began: float, ended: float, details: Mapping[str, Any]
    ) -> None:
        """Add an event; times are in seconds since 1970."""
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "cat": kind,
                "ts": round((began - self._start) * 1e6, 3),
                "dur": round((ended - began) * 1e6, 3),
                "pid": self._processes[process],
                "tid": self._tracks.setdefault((process, track), len(self._tracks) + 1),
                "args": {key: value for key, value in details.items() if value is not None},
            }
        )

    def list(self) -> list[dict[str, Any]]:
        """Return all events, after the names of processes and tracks."""
        names = [_label("process_name", number, 0, name) for name, number in self._processes.items()]
        for order, (process, track) in enumerate(sorted(self._tracks)):
            number, identity = self._processes[process], self._tracks[process, track]
            names.append(_label("thread_name", number, identity, track))
            names.append({**_label("thread_sort_index", number, identity, track), "args": {"sort_index": order}})
        return names + self._events


def _leaves(node: SpanNode) -> Iterable[SpanNode]:
    return node.children if node.kind == "turn" else [node]


def _label(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}
