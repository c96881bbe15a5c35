"""The SQLite file of an index: its location, its scan positions, and incremental updates from a changing store.

A file of the store is scanned from the end of the last scan. If it was truncated, edited, replaced or removed, the
index drops all entries from this file's step on, and scans these files again. Each transaction scans at most
`CHUNK` bytes, so that a killed process loses little and several processes can update one index.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from agentrl.errors import UsageError
from agentrl.observe.files import DamagedRecord
from agentrl.observe.index_scan import (
    EntryState,
    IndexEntry,
    Line,
    StoreScan,
    pack_pieces,
    read_pieces,
    scan_lines,
    tail_checksum,
    unpack_pieces,
)
from agentrl.observe.run_folder import step_of
from agentrl.observe.trajectory_store import step_files

_log = logging.getLogger(__name__)

FORMAT = 2
"""Version of the tables; an index of another version is built again."""
LOCK_S = 30.0
"""Seconds to wait for another process that updates the index."""
CACHE_KB = 65_536
"""Memory for pages of the index, in KiB."""
READER_CACHE_KB = 4096
"""The same for a read-only index, several of which may be open; the system also keeps its file in memory."""
COLUMNS = (
    *("id", "environment", "task_id", "task_type", "group_id", "member", "attempt", "outcome", "is_trainable"),
    *("error", "reward", "success", "turns", "sequences", "tokens", "sampled_tokens", "longest", "largest_id"),
    *("missing_logprobs", "oldest_version", "newest_version", "roles", "invalid", "truncated"),
    *("started_at", "ended_at", "seconds", "task_digest"),
)
"""Columns of an entry that a row shows."""
_EPISODE = (*COLUMNS, "step", "start_step", "end_offset", "state", "voided_by")
"""Columns of the table that selections scan."""
_CONTENT = ("pieces", "lengths", "signature", "outline")
"""Large columns, in a separate table."""
_READ = f"SELECT number, {', '.join((*_EPISODE, *_CONTENT))} FROM episodes JOIN contents USING (number)"
_SCHEMA = f"""
CREATE TABLE files (step INTEGER PRIMARY KEY, inode INTEGER, size INTEGER, changed INTEGER, position INTEGER,
    tail INTEGER, has_checksums INTEGER, lines INTEGER, damaged INTEGER);
CREATE TABLE damage (step INTEGER, line INTEGER);
CREATE TABLE images (checksum TEXT, step INTEGER, offset INTEGER, length INTEGER);
CREATE INDEX images_by_checksum ON images (checksum);
CREATE TABLE episodes (number INTEGER PRIMARY KEY, {", ".join(_EPISODE)});
CREATE TABLE contents (number INTEGER PRIMARY KEY, {", ".join(_CONTENT)});
CREATE TRIGGER forget AFTER DELETE ON episodes BEGIN DELETE FROM contents WHERE number = old.number; END;
CREATE INDEX episodes_by_id ON episodes (id);
CREATE INDEX episodes_by_end ON episodes (step, end_offset);
CREATE INDEX episodes_by_group ON episodes (group_id);
CREATE INDEX episodes_by_task ON episodes (task_id);
CREATE INDEX running ON episodes (state) WHERE state = {EntryState.RUNNING:d};
PRAGMA user_version = {FORMAT};
"""
MAX_DAMAGE = 100
"""Number of damaged lines of a file whose numbers are kept."""
_FROM_START = -1
"""A step before all files."""


@dataclass(frozen=True, slots=True)
class StoreFile:
    """A file of the store as it is on disk."""

    path: Path
    inode: int
    size: int
    changed: int
    """Time of the last change of the file's content or state, in nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedFile:
    """File of a store with records that cannot be read."""

    path: Path
    records: int
    """Number of damaged records."""
    lines: list[int]
    """Line numbers of the first `MAX_DAMAGE` of them, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScannedFile:
    """Part of a file that an index has scanned."""

    step: int
    inode: int
    size: int
    changed: int
    position: int
    """End of the last complete line."""
    tail: int
    """Checksum of the bytes before `position`."""
    has_checksums: int
    lines: int
    damaged: int


class IndexFile:
    """Index of one store in an SQLite file.

    Args:
        store: Folder of a trajectory store, one of its files, or the file of an evaluation.
        spare: File for the index if neither the store's folder nor the cache folder can be written; by default the
            index is then in memory.
        built_at: File of an index that another object builds and updates; it is only read, by any thread.

    Raises:
        UsageError: the store does not exist, or there is no index at `built_at`.
    """

    def __init__(self, store: Path, *, spare: Path | None = None, built_at: Path | None = None) -> None:
        if not store.exists():
            raise UsageError(f"no trajectories found in {store}", got="no such file or folder")
        self.store = store
        self._is_reader = built_at is not None
        self._places = [built_at] if built_at is not None else [self._beside(), *_cache_places(store), spare]
        """Remaining candidate locations; ``None`` is in memory."""
        self.database = self._open() if built_at is None else _open_reader(built_at)

    @property
    def place(self) -> Path | None:
        """File of the index; ``None`` in memory."""
        return self._places[0]

    def files(self) -> dict[int, StoreFile]:
        """Return the store's files by step; 0 for an evaluation."""
        paths = step_files(self.store) if self.store.is_dir() else [self.store]
        found = {}
        for path in paths:
            with suppress(OSError):
                state = path.stat()
                step = step_of(path.name, ".jsonl") or 0
                found[step] = StoreFile(path, state.st_ino, state.st_size, state.st_ctime_ns)
        return found

    def update(self, on_progress: Callable[[int, int], None]) -> None:
        """Scan the store's changes; `on_progress` receives the scanned bytes and the total."""
        while not self._is_reader:
            try:
                left = self._scan_chunk(on_progress)
            except sqlite3.Error as error:
                self._leave(error)
                continue
            if not left:
                return

    def distrust(self, step: int) -> None:
        """Let the next update scan the files of a step and later ones again; no effect on an index only read."""
        with suppress(sqlite3.Error):
            self.database.execute("UPDATE files SET inode = -1 WHERE step >= ?", [step])

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a statement; a damaged index is built again first."""
        try:
            return self.database.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            if self._is_reader:
                raise UsageError("the index cannot be read", got=error, hint="try again once it is rebuilt") from error
            if type(error) is not sqlite3.DatabaseError:
                raise
            self._leave(error)
        self.update(lambda done, size: None)
        return self.database.execute(statement, values).fetchall()

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    def damage(self) -> list[DamagedFile]:
        """Return the files with damaged records, in order."""
        lines: dict[int, list[int]] = {}
        for step, line in self.query("SELECT step, line FROM damage ORDER BY step, line"):
            lines.setdefault(step, []).append(line)
        files = self.query("SELECT step, damaged FROM files WHERE damaged > 0 ORDER BY step")
        paths = self.files()
        return [
            DamagedFile(path=paths[step].path, records=records, lines=lines.get(step, []))
            for step, records in files
            if step in paths
        ]

    def _beside(self) -> Path:
        folder, stem = (self.store, "") if self.store.is_dir() else (self.store.parent, f".{self.store.stem}")
        return folder / f"{stem}.index.sqlite"

    def _open(self) -> sqlite3.Connection:
        """Open the index at the first writable location."""
        while True:
            place = self._places[0]
            try:
                if place is not None and place != self._beside():
                    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                return _open_database(place)
            except (sqlite3.Error, OSError) as error:
                if len(self._places) == 1:
                    raise UsageError("cannot build an index", got=error) from error
                _log.debug("no index at %s: %s", place, error)
                del self._places[0]

    def _leave(self, error: sqlite3.Error) -> None:
        """After an error, continue in a new file or at the next location."""
        place = self._places[0]
        _log.debug("abandoning the index %s: %s", place, error)
        self.database.close()
        is_damaged = type(error) is sqlite3.DatabaseError
        if place is None or not (is_damaged or isinstance(error, sqlite3.OperationalError)):
            raise UsageError("cannot build an index", got=error) from error
        if is_damaged:
            with suppress(OSError):
                place.unlink()
        if place.exists():
            del self._places[0]
        self.database = self._open()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self.database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with suppress(sqlite3.Error):
                self.database.execute("ROLLBACK")
            raise
        self.database.execute("COMMIT")

    def _scan_chunk(self, on_progress: Callable[[int, int], None]) -> bool:
        """Scan at most a chunk of one file; return True if more is left."""
        if self._is_current(self.files(), self._scanned_files()):
            return False
        with self._transaction():
            found, known = self.files(), self._scanned_files()
            valid = {step: file for step, file in known.items() if self._continues(found.get(step), file)}
            first = min((step for step in known if step not in valid), default=None)
            late = [step for step in found if step not in known and known and step < max(known)]
            grown = [step for step in valid if found[step].size != known[step].size and step < max(known)]
            if (changed := min((*([] if first is None else [first]), *late, *grown), default=None)) is not None:
                self._forget_since(changed, found)
                known = self._scanned_files()
            step = next((one for one in sorted(found) if not _is_same(found[one], known.get(one))), None)
            if step is not None:
                self._scan_file(step, found[step], known.get(step))
        done = sum(file.position for file in self._scanned_files().values())
        on_progress(done, sum(file.size for file in found.values()))
        return True

    def _scanned_files(self) -> dict[int, _ScannedFile]:
        rows = self.database.execute("SELECT * FROM files")
        names = [column[0] for column in rows.description]
        files = (_ScannedFile(**dict(zip(names, row, strict=True))) for row in rows)
        return {file.step: file for file in files}

    def _is_current(self, found: dict[int, StoreFile], known: dict[int, _ScannedFile]) -> bool:
        return found.keys() == known.keys() and all(_is_same(found[step], known[step]) for step in found)

    def _continues(self, file: StoreFile | None, known: _ScannedFile) -> bool:
        """Return True if a file is unchanged since its scan, or was only appended to."""
        if file is None or file.inode != known.inode or file.size < known.size:
            return False
        if file.size == known.size:
            return file.changed == known.changed
        with file.path.open("rb") as opened:
            return tail_checksum(opened, known.position) == known.tail

    def _scan_file(self, step: int, file: StoreFile, known: _ScannedFile | None) -> None:
        position = 0 if known is None else known.position
        has_checksums, damaged = known is not None and bool(known.has_checksums), list[tuple[int, int]]()
        running = list(self._entries("state = ? AND voided_by IS NULL", [EntryState.RUNNING]))
        scan, lines = StoreScan(running, self._images()), 0 if known is None else known.lines
        with file.path.open("rb") as opened:
            for line in scan_lines(opened, step, position, end=file.size, needs_checksum=has_checksums):
                scan.add(line)
                lines += 1
                if scan.damaged[-1:] == [line.piece]:
                    damaged.append((step, lines))
                position = line.piece.offset + line.piece.length
                has_checksums = has_checksums or line.has_checksum
            tail = tail_checksum(opened, position)
        self._save(scan)
        kept = max(0, MAX_DAMAGE - (0 if known is None else known.damaged))
        self.database.executemany("INSERT INTO damage VALUES (?, ?)", damaged[:kept])
        whole = known is not None and position == known.position  # only the beginning of a line is left
        size = file.size if whole or position == file.size else position
        values = (step, file.inode, size, file.changed, position, tail, has_checksums, lines)
        count = len(damaged) + (0 if known is None else known.damaged)
        self.database.execute("REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*values, count))

    def _images(self) -> list[str]:
        return [checksum for (checksum,) in self.database.execute("SELECT DISTINCT checksum FROM images")]

    def _entries(self, condition: str, values: Sequence[Any]) -> Iterator[IndexEntry]:
        for number, *row in self.database.execute(f"{_READ} WHERE {condition}", values).fetchall():
            columns = dict(zip((*_EPISODE, *_CONTENT), row, strict=True))
            lengths, shared, images = orjson.loads(columns["lengths"])
            yield IndexEntry(
                number=number,
                state=EntryState(columns["state"]),
                voided_by=columns["voided_by"],
                pieces=unpack_pieces(columns["pieces"]),
                lengths=lengths,
                shared=shared,
                images=set(images),
                columns={name: columns[name] for name in (*COLUMNS, "signature", "outline")},
            )

    def _save(self, scan: StoreScan) -> None:
        self.database.executemany("UPDATE episodes SET voided_by = ? WHERE id = ? AND voided_by IS NULL", scan.voided)
        (last,) = self.database.execute("SELECT COALESCE(MAX(number), 0) FROM episodes").fetchone()
        numbers = count(last + 1)
        for entry in scan.entries:
            entry.number = next(numbers) if entry.number is None else entry.number
        for table, names, values in (("episodes", _EPISODE, _episode), ("contents", _CONTENT, _content)):
            places = ", ".join("?" * (1 + len(names)))
            rows = ([entry.number, *values(entry)] for entry in scan.entries)
            self.database.executemany(f"REPLACE INTO {table} VALUES ({places})", rows)
        images = ([checksum, *piece] for checksum, piece in scan.images)
        self.database.executemany("INSERT INTO images VALUES (?, ?, ?, ?)", images)

    def _forget_since(self, step: int, found: dict[int, StoreFile]) -> None:
        """Drop the entries of the files of a step and of later steps."""
        self.database.execute("DELETE FROM episodes WHERE start_step >= ?", [step])
        self.database.execute("UPDATE episodes SET voided_by = NULL WHERE voided_by >= ?", [step])
        crossing = list(self._entries("step >= ?", [step]))
        self.database.executemany("DELETE FROM episodes WHERE number = ?", [[entry.number] for entry in crossing])
        self.database.execute("DELETE FROM images WHERE step >= ?", [step])
        self.database.execute("DELETE FROM damage WHERE step >= ?", [step])
        self.database.execute("DELETE FROM files WHERE step >= ?", [step])
        files = {number: file.path for number, file in found.items()}
        images = self._images()
        scan = StoreScan([], images)
        try:
            for entry in crossing:
                one, pieces = StoreScan([], images), [piece for piece in entry.pieces if piece.step < step]
                for piece, record in zip(pieces, read_pieces(files, pieces), strict=True):
                    one.add(Line(piece, record, has_checksum=False))
                for earlier in one.entries:
                    earlier.voided_by = entry.voided_by
                scan.entries += one.entries
        except (DamagedRecord, KeyError, OSError):
            self._forget_since(_FROM_START, found)
            return
        self._save(scan)


def _episode(entry: IndexEntry) -> list[Any]:
    """Return the values of `_EPISODE`."""
    start, last = entry.pieces[0], entry.pieces[-1]
    known = (entry.columns[name] for name in COLUMNS)
    return [*known, last.step, start.step, last.offset, entry.state, entry.voided_by]


def _content(entry: IndexEntry) -> list[Any]:
    """Return the values of `_CONTENT`."""
    lengths = orjson.dumps([entry.lengths, entry.shared, list(entry.images)])
    return [pack_pieces(entry.pieces), lengths, entry.columns["signature"], entry.columns["outline"]]


def _is_same(file: StoreFile, known: _ScannedFile | None) -> bool:
    return known is not None and (file.inode, file.size, file.changed) == (known.inode, known.size, known.changed)


def _cache_places(store: Path) -> list[Path]:
    """Return the place of a store's index in the user's cache folder; none if there is no home folder."""
    name = hashlib.blake2b(os.fsencode(store.resolve()), digest_size=12).hexdigest()
    try:
        base = os.environ.get("AGENTRL_CACHE") or Path.home() / ".cache" / "agentrl"
    except RuntimeError:
        return []
    return [Path(base) / "indexes" / f"{name}.sqlite"]


def _open_reader(place: Path) -> sqlite3.Connection:
    """Open an index that another object builds; reads wait for a transaction, but not for a whole scan."""
    try:
        database = sqlite3.connect(
            f"{place.absolute().as_uri()}?mode=rw",
            timeout=LOCK_S,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
    except sqlite3.Error as error:
        raise UsageError(f"no index in {place}", got=error, hint="it is being rebuilt: try again") from error
    try:
        database.execute("PRAGMA query_only = ON")
        database.execute(f"PRAGMA cache_size = -{READER_CACHE_KB}")
        version = int(database.execute("PRAGMA user_version").fetchone()[0])
    except sqlite3.Error as error:
        database.close()
        raise UsageError(f"no index in {place}", got=error, hint="it is being rebuilt: try again") from error
    if version != FORMAT:
        database.close()
        raise UsageError(f"the index {place} is from another version", got=version, expected=FORMAT)
    return database


def _open_database(place: Path | None) -> sqlite3.Connection:
    """Open an index, or create it; one that is damaged or of another version is removed first."""
    database = sqlite3.connect(":memory:" if place is None else place, timeout=LOCK_S, isolation_level=None)
    try:
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute(f"PRAGMA cache_size = -{CACHE_KB}")
        database.execute("BEGIN IMMEDIATE")
        version = int(database.execute("PRAGMA user_version").fetchone()[0])
        is_new = version == 0 and not database.execute("SELECT name FROM sqlite_master").fetchone()
        if is_new:
            for statement in _SCHEMA.split(";\n"):
                database.execute(statement)
        database.execute("COMMIT")
        if is_new or version == FORMAT:
            return database
    except sqlite3.OperationalError:
        database.close()
        raise
    except sqlite3.DatabaseError:  # not a database
        _log.debug("the index %s is damaged and will be rebuilt", place)
    database.close()
    if place is None:
        raise sqlite3.DatabaseError("a database in memory is damaged")
    place.unlink()
    return _open_database(place)
