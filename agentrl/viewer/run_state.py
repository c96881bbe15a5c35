"""State of a run or an evaluation: running, finished, crashed or stalled, as its files and its lock tell."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from agentrl.observe.run_folder import LOCK
from agentrl.observe.run_status import STATUS_FILE, Liveness
from agentrl.observe.run_status import read_status as read_snapshot
from agentrl.viewer.sources import OpenedFolders, SourceFolder, SourceKind

LARGEST_STATUS = 32 * 2**20
"""Maximum bytes of ``status.json`` that are read."""
WITHOUT_NEWS_S = 600.0
"""Seconds without a change of any file after which a run that is not over counts as stalled."""
ELSEWHERE_S = 60.0
"""Age of the newest change up to which a run counts as running if its lock is not visible, as on a shared disk."""
OVERDUE_S = 5.0
"""Seconds after its deadline from which a wait means that the run has stalled."""
_LOCKS = Path("/proc/locks")


class SourceState(enum.StrEnum):
    """State of a run or an evaluation."""

    RUNNING = "running"
    FINISHED = "finished"
    CRASHED = "crashed"
    """Its process ended before its last step."""
    STOPPED = "stopped"
    """It was interrupted, and can be resumed."""
    STALLED = "stalled"
    """Its process is there but does nothing, or waits past a deadline."""


_STATES = {
    Liveness.RUNNING: SourceState.RUNNING,
    Liveness.HUNG: SourceState.STALLED,
    Liveness.SUSPENDED: SourceState.STALLED,
    Liveness.FINISHED: SourceState.FINISHED,
    Liveness.STOPPED: SourceState.STOPPED,
    Liveness.FAILED: SourceState.CRASHED,
    Liveness.CRASHED: SourceState.CRASHED,
}


def read_status(folders: OpenedFolders, source: SourceFolder) -> dict[str, Any] | None:
    """Read ``status.json``; ``None`` if there is none, or it is damaged or too large."""
    path = folders.file(source, STATUS_FILE)
    if path is None:
        return None
    with suppress(OSError, ValueError):
        if path.stat().st_size <= LARGEST_STATUS:
            status = orjson.loads(path.read_bytes())
            return status if isinstance(status, dict) else None
    return None


def state_of(
    source: SourceFolder, status: Mapping[str, Any] | None, *, is_complete: bool, changed: float
) -> SourceState:
    """Return the state of a source.

    Args:
        source: The run or evaluation.
        status: Its status, if it writes one.
        is_complete: True if its last step or episode has ended.
        changed: Time of the newest change of its files, in seconds since 1970.
    """
    now = time.time()
    snapshot = None if status is None else read_snapshot(source.path)
    if snapshot is not None:
        state = _STATES[snapshot.liveness(now)]
        is_overdue = any(wait.deadline is not None and wait.deadline < now - OVERDUE_S for wait in snapshot.waits)
        return SourceState.STALLED if state is SourceState.RUNNING and is_overdue else state
    if is_complete:
        return SourceState.FINISHED
    if is_locked(source.path / LOCK):
        is_quiet = now - changed > WITHOUT_NEWS_S
        return SourceState.STALLED if is_quiet else SourceState.RUNNING
    is_elsewhere = status is None and not _LOCKS.exists()
    return SourceState.RUNNING if is_elsewhere and now - changed <= ELSEWHERE_S else SourceState.CRASHED


def is_over(source: SourceFolder, *, step: int | None, steps: int | None) -> bool:
    """Return True if a source has ended as it should."""
    if source.kind is SourceKind.EVALUATION:
        return source.result_file.is_file()
    run = source.run
    with suppress(OSError):
        if run.diagnosis_file.stat().st_mtime >= run.metrics_file.stat().st_mtime:
            return True
    return step is not None and steps is not None and step >= steps


def is_locked(path: Path) -> bool:
    """Return True if a process of this machine holds the lock file of a folder.

    It reads the system's table of locks: an attempt to lock the file could make a run fail that begins just then.
    """
    try:
        inode = str(os.stat(path).st_ino)
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return False
    fields = (line.split() for line in lines if " FLOCK " in line)
    return any(inode == words[5].rpartition(":")[2] for words in fields if len(words) > 5 and words[1] == "FLOCK")
