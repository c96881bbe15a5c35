"""Files of the journals of episodes in flight: written by a thread, and read after a kill.

The folder ``inflight`` of an asynchronous run has one file of JSON Lines for each episode in flight. Its name is a hash
of the trajectory's id. The event loop only queues records; a thread writes them every `FLUSH_S` seconds. A file is
removed once the trajectory store has the episode. Kinds of records:

- ``start``: id of the trajectory.
- ``answer``: answer of the engine, with its tokens, log-probabilities and weight versions; ``key`` is a hash of the
  prompt.
- ``environment``: call of the environment; ``key`` is a hash of the action, ``seen`` one of the result. If the
  environment takes snapshots, the record also has the result and a snapshot of the state after it, as JSON texts.
- ``tool``: call of a tool, with the same hashes; for the environment's own tools also with result and snapshot.
- ``stop``: reason why the episode cannot be continued; later records are not written.

All records but the first have the episode's age in seconds as ``at``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.errors import described_error
from agentrl.observe.files import UNREADABLE, DamagedRecord, decode_record, encode_record, write_fully

FLUSH_S = 0.5
"""Seconds between two writes of the queued records."""
LAST_WRITE_S = 1.0
"""Seconds for which the end of a run waits for the last write."""
MAX_JOURNAL_BYTES = 1 << 26
"""Maximum size of an episode's journal in bytes; a longer episode starts again after a kill."""
MAX_QUEUED = 200_000
"""Maximum number of queued records, if the disk is too slow; then no more journals are written."""
_log = logging.getLogger(__name__)

Record: TypeAlias = dict[str, Any]
JournalRecord: TypeAlias = Mapping[str, Any]


def fingerprint(value: Any) -> str:
    """Return a hash of JSON types; objects of other types count by their representation."""
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@dataclass(slots=True)
class _Queued:
    """Queued changes of one journal."""

    is_new: bool = False
    """True if the file begins with these records."""
    is_removed: bool = False
    records: list[JournalRecord] = field(default_factory=list)


class JournalWriter:
    """Writer of all journals of a run, in a thread that starts with the first record.

    If a journal cannot be written, the error is logged once, and nothing more is written.

    Args:
        folder: Folder of the journals; created if needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._queued: dict[str, _Queued] = {}
        self._count = 0
        self._sizes: dict[str, int] = {}
        self._failed = False
        self._queueing, self._writing = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, name: str, record: JournalRecord) -> None:
        """Begin a journal; an earlier one of the same name is replaced."""
        self._queue(name, _Queued(is_new=True, records=[record]))

    def append(self, name: str, record: JournalRecord) -> None:
        """Append a record, which must not change later."""
        with self._queueing:
            if (queued := self._queued.get(name)) is not None:
                self._count += 1
                queued.records.append(record)
                return
        self._queue(name, _Queued(records=[record]))

    def remove(self, name: str) -> None:
        """Remove a journal, if it exists."""
        self._queue(name, _Queued(is_removed=True))

    def flush(self) -> None:
        """Write everything that is queued."""
        with self._writing:
            with self._queueing:
                queued, self._queued, self._count = self._queued, {}, 0
            try:
                for name, change in queued.items():
                    self._write(name, change)
            except (OSError, TypeError, ValueError) as error:  # the disk, or a value that JSON cannot hold
                self._fail(described_error(error))

    def close(self) -> None:
        """Write everything that is queued, and end the thread; an empty folder is removed."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(LAST_WRITE_S)

    def _queue(self, name: str, change: _Queued) -> None:
        if self._failed:
            return
        with self._queueing:
            self._queued[name] = change
            self._count += 1
        if self._count > MAX_QUEUED:
            self._fail("the disk does not keep up")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="agentrl-journals", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while not self._ended.wait(FLUSH_S):
            self.flush()
        self.flush()
        with suppress(OSError):  # some are kept
            self._folder.rmdir()

    def _write(self, name: str, change: _Queued) -> None:
        path = self._folder / name
        if change.is_removed:
            self._sizes.pop(name, None)
            path.unlink(missing_ok=True)
            return
        before = 0 if change.is_new else self._sizes.get(name, 0)
        if before > MAX_JOURNAL_BYTES:
            return
        data = _lines(change.records)
        self._sizes[name] = before + len(data)
        if before + len(data) > MAX_JOURNAL_BYTES:
            data = _lines([*change.records[: change.is_new], stop_record("their journals became too large")])
        append_to(path, data, is_new=change.is_new)

    def _fail(self, reason: str) -> None:
        if self._failed:
            return
        self._failed = True
        with self._queueing:
            self._queued = {}
        _log.warning(
            "the journals in %s cannot be written (%s): after a kill, episodes in flight start again",
            self._folder,
            reason,
        )


def _lines(records: Sequence[JournalRecord]) -> bytes:
    return b"".join(encode_record(record) + b"\n" for record in records)


def append_to(path: Path, data: bytes, *, is_new: bool) -> None:
    """Append to a file, or write it anew; a missing folder is created."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if is_new else os.O_APPEND)
    try:
        descriptor = os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(exist_ok=True)  # not its parents: the run's folder may have been removed
        descriptor = os.open(path, flags, 0o644)
    try:
        write_fully(descriptor, data)
    finally:
        os.close(descriptor)


def stop_record(reason: str) -> Record:
    """Return the record after which an episode cannot be continued."""
    return {"kind": "stop", "reason": reason}


@dataclass(slots=True, kw_only=True)
class RecordedEpisode:
    """Records of an episode that was in flight when its run was killed; its replay consumes them."""

    id: str
    """Id of the trajectory."""
    answers: deque[Record] = field(default_factory=deque)
    calls: deque[Record] = field(default_factory=deque)
    """Calls of the environment."""
    tools: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    """Age of the episode at the last record."""
    problem: str | None = None
    """Reason why the episode cannot be continued."""
    restores: bool = False
    """True if the environment gets the snapshot after the last change; otherwise its actions are replayed."""
    snapshot: str | None = None
    changes: int = 0
    """Number of records of calls that change the environment."""

    @property
    def player(self) -> str:
        """Group and member of the episode."""
        return self.id.rpartition(".")[0]

    @property
    def attempt(self) -> int:
        """Number of the attempt."""
        return int(self.id.rpartition(".")[2])

    @property
    def group_id(self) -> str:
        """Id of the group."""
        return self.player.rpartition("/")[0]

    def add(self, record: Record) -> None:
        """Add a record that was written after the others.

        Raises:
            KeyError, TypeError, ValueError: it is malformed.
        """
        match record["kind"]:
            case "answer":
                if not len(record["token_ids"]) == len(record["logprobs"]) == len(record["versions"]):
                    raise ValueError("a token lacks its log-probability or version")
                if not all(type(logprob) in (float, int) for logprob in record["logprobs"]):
                    raise TypeError("a log-probability is not a number")
                self.answers.append(record)
            case "environment":
                self.calls.append(record)
            case "tool":
                self.tools.append(record)
            case "stop":
                self.problem = str(record["reason"])
            case kind:
                raise ValueError(f"unknown kind {kind}")
        self.seconds = record.get("at", self.seconds)

    def choose_recovery(self) -> None:
        """Choose to restore or to replay the environment; call it after the last record was read."""
        changes = [record for record in (*self.calls, *self.tools) if record.get("changes")]
        self.changes = len(changes)
        last = max(changes, key=lambda record: record["number"], default=None)
        self.restores = last is not None and "snapshot" in last and all("result" in record for record in changes)
        if self.restores and last is not None:
            self.snapshot = last["snapshot"]
        else:
            self.calls = deque(record for record in self.calls if record.get("changes"))


def read_journal(path: Path, *, version: int) -> RecordedEpisode | None:
    """Read a journal up to its first damaged record, or to the first answer with tokens of newer weights.

    The rest of the file is removed, so that new records continue it.

    Args:
        path: The journal.
        version: Version of the checkpoint's weights.

    Returns:
        The episode; ``None`` if no answer was written, so that nothing is lost. An unreadable file is an episode
        without an id.
    """
    data, kept, is_newer = path.read_bytes(), 0, False
    found: RecordedEpisode | None = None
    for number, line in enumerate(data.splitlines(keepends=True)):
        try:
            if not line.endswith(b"\n"):
                break
            record = decode_record(line, needs_checksum=True)
            is_newer = max(record.get("versions", ()), default=-1) > version
            if is_newer:
                break
            if found is None:
                found = RecordedEpisode(id=record["id"])
            else:
                found.add({**record, "number": number})
        except (DamagedRecord, *UNREADABLE):
            break
        kept += len(line)
    if kept < len(data):
        os.truncate(path, kept)
    if found is None:
        return RecordedEpisode(id="", problem="their journals are damaged")
    if is_newer and not found.answers:
        found.problem = found.problem or "all their turns were sampled by weights that the checkpoint lacks"
    found.choose_recovery()
    return found if found.answers or found.problem else None


def file_name(trajectory_id: str) -> str:
    """Return the name of a trajectory's journal."""
    return f"{fingerprint(trajectory_id)}.jsonl"
