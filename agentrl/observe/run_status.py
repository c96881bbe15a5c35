"""Status file of a run, which other programs can read while the run is working or hanging, and after a crash.

A thread of the run replaces ``status.json`` every second (`agentrl.runs.status_writer`). After a kill, its last version
remains, with the episodes that were in flight.
"""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from pydantic import TypeAdapter, ValidationError

from agentrl.observe.progress import LiveStatus

STATUS_FILE = "status.json"
INTERVAL_S = 1.0
"""Seconds between two statuses."""
SILENT_S = 10.0
"""Age in seconds at which the status of a living process counts as old."""
MAX_STATUS_BYTES = 32 * 2**20
"""Maximum bytes of a status that is read."""


class EpisodeState(enum.StrEnum):
    """State of a running episode: the part that it waits for."""

    WAITING = "waiting"
    """A free slot."""
    GENERATING = "generating"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    SCORING = "scoring"
    LOOP = "loop"
    """Its agent loop, for a reason that the run does not know."""


class RunEnd(enum.StrEnum):
    """Regular ends of a run."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """It was interrupted, and can be resumed."""
    FAILED = "failed"


class Liveness(enum.StrEnum):
    """State of a run, by its status and its process."""

    RUNNING = "running"
    HUNG = "hung"
    """The process lives, but its status is outdated: code holds the interpreter lock, the process is suspended, or the
    disk hangs.
    """
    SUSPENDED = "suspended"
    """The process was stopped by a signal (SIGSTOP, Ctrl-Z)."""
    FINISHED = "finished"
    STOPPED = "stopped"
    """It was interrupted, and its process exited without recording the end."""
    FAILED = "failed"
    CRASHED = "crashed"
    """The process exited without recording the reason, for example because it was killed."""

    @property
    def is_over(self) -> bool:
        """True if the run has ended."""
        return self not in (Liveness.RUNNING, Liveness.HUNG, Liveness.SUSPENDED)

    @property
    def is_trouble(self) -> bool:
        """True if the run needs attention."""
        return self in (Liveness.HUNG, Liveness.SUSPENDED, Liveness.FAILED, Liveness.CRASHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentWait:
    """One wait of a run."""

    owner: str
    """Episode, or part of the run."""
    kind: str
    """Kind of wait: ``engine``, ``environment``, ``tool``, …"""
    what: str
    since: float
    deadline: float | None = None
    """Time at which the wait times out; ``None`` without a deadline."""
    unblocks: str = ""
    """Config key or action that ends the wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedLoop:
    """Code that blocks the event loop of a run."""

    since: float
    by: str
    """The latest wait or the running task, with the file and line that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of an engine."""

    name: str
    running: int = 0
    queue: int = 0
    """Number of waiting requests."""
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnText:
    """Text of a message, cut in the middle if it is long."""

    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeInFlight:
    """A running episode."""

    id: str
    environment: str
    task: str
    state: EpisodeState
    since: float
    """Time at which the state began."""
    started: float
    n_turns: int = 0
    turns: Sequence[TurnText] = ()
    """Its last messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """Status of a run at one moment; times are in seconds since 1970."""

    pid: int
    process_started: int | None = None
    """Start time of the process in ticks since boot, which distinguishes it from a later process with the same id."""
    host: str = ""
    pid_namespace: str = ""
    """PID namespace of the process: a container may have the machine's name, but has other process ids."""
    time: float = 0.0
    started: float = 0.0
    phase: str = ""
    step: int = 0
    """Number of finished steps."""
    steps: int = 0
    seconds_left: float | None = None
    waits: Sequence[CurrentWait] = ()
    """Waits, oldest first."""
    waiting: int = 0
    """Number of waits, including those that `waits` leaves out."""
    blocked: BlockedLoop | None = None
    episodes: Mapping[str, int] = field(default_factory=dict)
    """Number of running episodes by `EpisodeState`."""
    episodes_done: int = 0
    """Episodes that ended since the last training step."""
    attempts_failed: int = 0
    latest_failure: str = ""
    engines: Sequence[EngineLoad] = ()
    memory_bytes: int | None = None
    live: LiveStatus | None = None
    """State of the live traffic that the run learns from."""
    in_flight: Sequence[EpisodeInFlight] = ()
    resumed_by: str = ""
    """Command whose option ``--resume`` resumes this run, such as ``train`` or ``sft``; empty if there is none."""
    stopping: bool = False
    """True once the run was asked to stop."""
    ended: float | None = None
    end: RunEnd | None = None
    error: str | None = None

    @property
    def is_elsewhere(self) -> bool:
        """True if the process is on another machine or in another container, so that it cannot be examined."""
        return self.host != socket.gethostname() or self.pid_namespace not in ("", own_pid_namespace())

    def liveness(self, now: float) -> Liveness:
        """Return the state of the run at the time `now`.

        For a run of another machine or in another container, only the status is known.
        """
        if self.end is not None:
            return Liveness(self.end)
        is_late = now - self.time > SILENT_S
        if self.is_elsewhere:
            return Liveness.HUNG if is_late else Liveness.RUNNING
        if (state := _process_state(self.pid, self.process_started)) is None:
            return Liveness.STOPPED if self.stopping else Liveness.CRASHED
        if state == "T":
            return Liveness.SUSPENDED
        return Liveness.HUNG if is_late else Liveness.RUNNING


def own_pid_namespace() -> str:
    """Return the PID namespace of this process; empty if the system does not name it."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_start(pid: int) -> int | None:
    """Return a process's start time in ticks since boot; ``None`` if there is no such process."""
    words = _process_words(pid)
    return None if words is None else int(words[19])


def _process_state(pid: int, started: int | None) -> str | None:
    """Return the letter of a process's state, such as R, S or T; ``None`` if it is gone, or another one."""
    words = _process_words(pid)
    if words is None or words[0] in "ZX" or (started is not None and int(words[19]) != started):
        return None
    return words[0]


def _process_words(pid: int) -> list[str] | None:
    """Return the fields of a process's ``stat`` after its name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None


_READER = TypeAdapter(RunSnapshot)


def read_status(run: Path) -> RunSnapshot | None:
    """Read the status in a run's folder; ``None`` if there is none, it is too large, or an unknown version wrote it."""
    file = run / STATUS_FILE
    try:
        return _READER.validate_json(file.read_bytes()) if file.stat().st_size <= MAX_STATUS_BYTES else None
    except (OSError, ValidationError):
        return None


def write_status(run: Path, snapshot: RunSnapshot) -> None:
    """Replace the status in a run's folder atomically; it is not synced to disk, as it is replaced every second.

    Raises:
        OSError: the folder is gone, or the disk is full.
    """
    file = run / STATUS_FILE
    partial = file.with_name(f"{STATUS_FILE}.partial")
    partial.write_bytes(orjson.dumps(snapshot, option=orjson.OPT_APPEND_NEWLINE))
    os.replace(partial, file)
