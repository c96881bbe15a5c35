"""Index of stored trajectories, which finds and reads parts of a large store without reading the rest.

    with TrajectoryIndex(run.trajectories) as index:
        rows = index.select(EpisodeFilter(first_step=40, success=False), order="reward", limit=20)
        stored = index.read(rows[0])

The JSON Lines files are authoritative. The index is an SQLite file next to them, which may be deleted at any time: it
is brought up to date when it is opened and by `update`, which read appended records, and read again files that were
truncated, edited or replaced. Writing a store does not need the index, which may be used at the same time. If the
folder cannot be written, the index is in the user's cache folder, or in memory.
"""

from __future__ import annotations

import math
import time
import zlib
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Self, TypeAlias, get_args

import orjson

from agentrl.errors import Outcome, UsageError
from agentrl.message import EpisodeMessages, ImagePart
from agentrl.message.image import image_from_record
from agentrl.observe.files import UNREADABLE
from agentrl.observe.index_file import COLUMNS, DamagedFile, IndexFile
from agentrl.observe.index_scan import (
    EntryState,
    Piece,
    episode_text,
    is_evaluated,
    may_contain,
    read_pieces,
    unpack_pieces,
)
from agentrl.observe.trajectory_record import trajectory_from_record
from agentrl.observe.trajectory_store import EpisodeParts, StoredTrajectory
from agentrl.trajectory import Trajectory

EpisodeOrder: TypeAlias = Literal["ended", "reward", "turns", "tokens", "seconds", "environment", "task_id", "outcome"]
"""Columns to sort by; equal ones are in the order in which the episodes ended."""
EpisodeColumn: TypeAlias = Literal[
    "step", "environment", "task_id", "task_type", "group_id", "outcome", "roles", "is_trainable"
]
"""Columns by which episodes are counted; ``roles`` is a list in JSON."""
DecodeTokens: TypeAlias = Callable[[list[int]], str]
"""Decoder of token ids, for the text of episodes that were stored without messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """Entry of an episode in an index.

    Example: an episode of two turns whose group is ``7-train-3`` has ``member=1, turns=2, tokens=140,
    sampled_tokens=38, oldest_version=6, newest_version=6, outcome=Outcome.FINISHED, reward=1.0``.
    """

    number: int
    """Number of the row, for `TrajectoryIndex.read`; a rebuilt index has other numbers."""
    id: str
    step: int
    """Training step during which the last record was written; 0 for an evaluation."""
    start_step: int
    """Training step during which the episode started."""
    complete: bool
    """True if the episode ended."""
    environment: str
    split: str | None
    """Split of the environment; ``None`` if the index was not given the splits."""
    task_id: str
    task_type: str | None
    group_id: str
    member: int | None
    """Number of the member in its group, or of an evaluation's sample."""
    attempt: int
    outcome: Outcome | None
    is_trainable: bool
    """True if the episode ended without an infrastructure failure and has a reward."""
    error: str | None
    reward: float | None
    success: bool | None
    turns: int
    sequences: int
    tokens: int
    """Number of all tokens; shared ones count once."""
    sampled_tokens: int
    longest: int
    """Number of tokens of the longest sequence."""
    largest_id: int
    """Largest token id."""
    missing_logprobs: int
    """Number of sampled tokens without a log-probability."""
    oldest_version: int | None
    newest_version: int | None
    """Weight versions of the sampled tokens."""
    roles: tuple[str, ...]
    invalid: int
    """Number of turns whose answer was not parsed or not accepted."""
    truncated: bool
    """True if a budget cut the episode or an answer."""
    started_at: float | None
    ended_at: float | None
    """Times in seconds since 1970; ``None`` if the store does not have them."""
    seconds: float | None
    """Duration of the episode."""
    task_digest: str | None
    """Digest of the task's content, in an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFilter:
    """Conditions of a selection; ``None`` is no condition. Ranges include both ends."""

    complete: bool | None = True
    """``None`` includes episodes that have not ended."""
    first_step: int | None = None
    last_step: int | None = None
    environment: str | None = None
    split: str | None = None
    task_id: str | None = None
    task_type: str | None = None
    group_id: str | None = None
    outcomes: Collection[Outcome] | None = None
    is_trainable: bool | None = None
    is_infrastructure: bool | None = None
    """False excludes infrastructure failures."""
    success: bool | None = None
    """False includes episodes of unknown success."""
    least_reward: float | None = None
    most_reward: float | None = None
    least_turns: int | None = None
    most_turns: int | None = None
    least_tokens: int | None = None
    most_tokens: int | None = None
    role: str | None = None
    has_sequences: bool | None = None
    """True excludes episodes that failed before their first token."""
    invalid: bool | None = None
    """True for episodes with an invalid turn."""
    truncated: bool | None = None
    text: str | None = None
    """Part of a message or of the error, in upper or lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePage:
    """Some rows of a selection."""

    rows: list[EpisodeRow]
    last: int | None
    """Number of the row after which the next page begins; ``None`` if there is no other page."""
    unsearched: int
    """Number of later rows that a text search has not examined."""


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """Counts and means of the episodes with the same values in some columns.

    Example: by ``("environment", "task_type")``, three episodes of which one is solved have ``values=("household",
    "clean"), episodes=3, judged=3, solved=1, rewarded=3, reward=0.33``.
    """

    values: tuple[Any, ...]
    """Values of the columns."""
    episodes: int
    judged: int
    """Number of episodes that were solved or failed: all without infrastructure failure, of environments that report
    success in some of their episodes.
    """
    solved: int
    rewarded: int
    """Number of episodes with a reward."""
    reward: float | None
    """Mean reward; ``None`` if no episode has a reward."""
    reward_squared: float | None
    """Mean of the squared rewards, for their standard deviation."""


ALL = EpisodeFilter()
_VALID = f"voided_by IS NULL AND state != {EntryState.DAMAGED:d}"
_ROW = f"number, {', '.join(COLUMNS)}, step, start_step, state"
_CONTENT = "FROM contents JOIN episodes USING (number) WHERE number = ? AND id = ?"
_MAX_INT64 = 2**63 - 1
_SIGNATURES = 8192
"""Number of signatures per read."""
_REBUILT = "it was rebuilt: start at the first page"
_SEARCHED_AT_ONCE = 500
"""Number of rows that a search reads at once."""
_ENDED = ("step", "end_offset")
_RANGES = ("step", "reward", "turns", "tokens")
_EQUAL = ("environment", "task_id", "task_type", "group_id", "is_trainable")


class TrajectoryIndex:
    """Index of a trajectory store or of an evaluation's episodes, to be used in the thread that opens it.

    Args:
        store: Folder of a trajectory store, one of its files, or the file of an evaluation.
        splits: Splits by the name of their environment.
        decode: Decodes token ids, to search the text of episodes that were stored without messages.
        on_progress: Receives the bytes that are scanned and their number at the end, while the index is built.
        is_updated: False to open the index as it is; the caller calls `update`.
        spare: File for an index that can be written nowhere else; by default it is then in memory.
        built_at: `place` of another object that builds the index; this one only reads it, in any thread, and `update`
            only finds the store's files.

    Raises:
        UsageError: the store does not exist.
    """

    def __init__(
        self,
        store: Path,
        *,
        splits: Mapping[str, str] = MappingProxyType({}),
        decode: DecodeTokens | None = None,
        on_progress: Callable[[int, int], None] = lambda done, size: None,
        is_updated: bool = True,
        spare: Path | None = None,
        built_at: Path | None = None,
    ) -> None:
        self._file = IndexFile(store, spare=spare, built_at=built_at)
        self.splits, self._decode = splits, decode
        self._paths: dict[int, Path] = {}
        if not is_updated:
            return
        try:
            self.update(on_progress)
        except BaseException:
            self.close()
            raise

    @property
    def place(self) -> Path | None:
        """File of the index; ``None`` in memory."""
        return self._file.place

    def distrust(self, step: int) -> None:
        """Let the next update scan the files of a step and later ones again."""
        self._file.distrust(step)

    def update(self, on_progress: Callable[[int, int], None] = lambda done, size: None) -> None:
        """Follow the changes of the store since the last update."""
        self._file.update(on_progress)
        self._paths = {step: file.path for step, file in self._file.files().items()}

    def close(self) -> None:
        """Close the index."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def damaged(self) -> int:
        """Number of damaged records, which are left out."""
        return sum(file.records for file in self.damage())

    def damage(self) -> list[DamagedFile]:
        """Return the files with damaged records, which are left out, in order."""
        return self._file.damage()

    def select(
        self,
        where: EpisodeFilter = ALL,
        *,
        order: EpisodeOrder = "ended",
        descending: bool = False,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[EpisodeRow]:
        """Return the rows of the matching episodes.

        Rows without a value in the column `order` come first.
        """
        return list(self._select(where, order, descending, limit, offset))

    def count(self, where: EpisodeFilter = ALL) -> int:
        """Return the number of matching episodes; with a text, the episodes that may match are read."""
        if where.text:
            return len(self.select(where))
        condition, values = self._condition(where)
        return int(self._query(f"SELECT COUNT(*) FROM episodes WHERE {condition}", values)[0][0])

    def steps(self, where: EpisodeFilter = ALL) -> list[int]:
        """Return the steps of the matching episodes, in order."""
        if where.text:
            return sorted({row.step for row in self.select(where)})
        condition, values = self._condition(where)
        return [
            row[0] for row in self._query(f"SELECT DISTINCT step FROM episodes WHERE {condition} ORDER BY 1", values)
        ]

    def find(self, identity: str) -> EpisodeRow | None:
        """Return the row of an episode by its id, complete or running; ``None`` if there is none."""
        found = self._query(f"SELECT {_ROW} FROM episodes WHERE id = ? AND {_VALID} ORDER BY number DESC", [identity])
        return self._row(found[0]) if found else None

    def page(
        self,
        where: EpisodeFilter = ALL,
        *,
        order: EpisodeOrder = "ended",
        descending: bool = False,
        limit: int = 100,
        after: int | None = None,
        seconds: float = math.inf,
    ) -> EpisodePage:
        """Return some rows of the matching episodes.

        Rows without a value in the column `order` come first. The page begins after the row with the number `after`; it
        has fewer rows if the search of a text takes longer than `seconds` of CPU time, or five times as long.

        Raises:
            UsageError: the index has no row with the number `after`.
        """
        if where.text:
            numbers = self.numbers(where, order=order, descending=descending)
            return self.search(where.text, numbers, limit=limit, after=after, seconds=seconds)
        condition, values = self._condition(where)
        if after is not None:
            later, position = self._after(order, descending, after)
            condition, values = f"{condition} AND {later}", [*values, *position]
        sort = f"{condition} ORDER BY {self._sort(order, descending)}"
        found = self._query(f"SELECT {_ROW} FROM episodes WHERE {sort} LIMIT ?", [*values, _clamp(limit + 1)])
        rows = [self._row(values) for values in found[:limit]]
        return EpisodePage(rows=rows, last=rows[-1].number if len(found) > limit else None, unsearched=0)

    def numbers(self, where: EpisodeFilter, *, order: EpisodeOrder, descending: bool) -> array[int]:
        """Return the sorted numbers of the matching rows; a text in the filter is ignored."""
        condition, values = self._condition(replace(where, text=None))
        sort = f"{condition} ORDER BY {self._sort(order, descending)}"
        return array("q", [row[0] for row in self._query(f"SELECT number FROM episodes WHERE {sort}", values)])

    def summarize(self, by: Sequence[EpisodeColumn], where: EpisodeFilter = ALL) -> list[EpisodeSummary]:
        """Count the matching episodes by the values of columns, in the order of these values; a text is ignored."""
        condition, values = self._condition(replace(where, text=None))
        columns, failures = ", ".join(by), [outcome for outcome in Outcome if outcome.is_infrastructure]
        judged = f"""outcome NOT IN ({_marks(failures)})
            AND environment IN (SELECT environment FROM episodes WHERE success IS NOT NULL)"""
        statement = f"""SELECT {columns}, COUNT(*), COUNT(*) FILTER (WHERE {judged}),
            COUNT(*) FILTER (WHERE {judged} AND success = 1), COUNT(reward), AVG(reward), AVG(reward * reward)
            FROM episodes WHERE {condition} GROUP BY {columns} ORDER BY {columns}"""
        found = self._query(statement, [*failures, *failures, *values])
        return [EpisodeSummary(tuple(row[: len(by)]), *row[len(by) :]) for row in found]

    def read(self, row: EpisodeRow, *, messages: bool = False) -> StoredTrajectory:
        """Read an episode from the store.

        `messages` restores the messages that scorers read.

        Raises:
            UsageError: the store has changed since the index was updated, or the record is malformed.
        """
        try:
            return StoredTrajectory(self._read(row, messages=messages), row.step, complete=row.complete)
        except (*UNREADABLE, OSError) as error:
            self._file.distrust(row.start_step)
            raise UsageError(
                f"episode {row.id} cannot be read from {self._file.store}",
                got=f"{type(error).__name__}: {error}",
                expected="the records that the index has found there",
                hint="the store has changed since: try again",
            ) from error

    def outline(self, row: EpisodeRow) -> Trajectory:
        """Return an episode of an evaluation; its tokens are read from the store when they are first used.

        Raises:
            UsageError: the index was rebuilt; or from the tokens, if the store has changed.
        """
        found = self._query(f"SELECT outline, pieces {_CONTENT}", [row.number, row.id])
        if not found or found[0][0] is None:
            raise UsageError(f"episode {row.id} is not an episode of the evaluation {self._file.store}")
        outline, pieces = found[0]
        read = partial(_read_evaluated, self._paths, unpack_pieces(pieces))
        return trajectory_from_record(orjson.loads(zlib.decompress(outline)), read=read)

    def _query(self, statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        return self._file.query(statement, values)

    def search(
        self, text: str, numbers: array[int], *, limit: int, after: int | None = None, seconds: float = math.inf
    ) -> EpisodePage:
        """Return the first of the rows with some numbers whose episodes contain a text; see `page`.

        Raises:
            UsageError: the number `after` is not one of them.
        """
        if after is not None:
            try:
                numbers = numbers[numbers.index(after) + 1 :]
            except ValueError:
                raise UsageError("the index has no such row", got=after, hint=_REBUILT) from None
        rows: list[EpisodeRow] = []
        last: int | None = None
        deadline, late = time.thread_time() + seconds, time.monotonic() + 5 * seconds

        def is_over() -> bool:
            return last is not None and (len(rows) >= limit or time.thread_time() > deadline or time.monotonic() > late)

        for start in range(0, len(numbers), _SEARCHED_AT_ONCE):
            if is_over():
                return EpisodePage(rows=rows, last=last, unsearched=len(numbers) - start)
            block = numbers[start : start + _SEARCHED_AT_ONCE]
            possible = set(self._may_contain(text, f"number IN ({_marks(block)})", block))
            for position, number in enumerate(block, start):
                if number in possible:
                    if is_over():
                        return EpisodePage(rows=rows, last=last, unsearched=len(numbers) - position)
                    found = self._query(f"SELECT {_ROW} FROM episodes WHERE number = ?", [number])
                    rows += [row for row in map(self._row, found) if self._contains(row, text)]
                last = number
        return EpisodePage(rows=rows, last=None, unsearched=0)

    def _after(self, order: EpisodeOrder, descending: bool, number: int) -> tuple[str, list[Any]]:
        """Return the SQL condition of the rows that are sorted after one, with its values."""
        keys = [*(() if order == "ended" else (f"{order} IS NOT NULL", f"IFNULL({order}, 0)")), *_ENDED, "number"]
        place = ", ".join(keys)
        found = self._query(f"SELECT {place} FROM episodes WHERE number = ?", [number])
        if not found:
            raise UsageError("the index has no such row", got=number, hint=_REBUILT)
        return f"({place}) {'<' if descending else '>'} ({_marks(keys)})", list(found[0])

    def _sort(self, order: EpisodeOrder, descending: bool) -> str:
        if order not in get_args(EpisodeOrder):
            raise UsageError("episodes cannot be sorted by this", got=order, expected=", ".join(get_args(EpisodeOrder)))
        keys = [*(() if order == "ended" else (order,)), *_ENDED, "number"]
        return ", ".join(f"{key}{' DESC' if descending else ''}" for key in keys)

    def _select(
        self, where: EpisodeFilter, order: EpisodeOrder, descending: bool, limit: int | None, offset: int
    ) -> Iterator[EpisodeRow]:
        condition, values = self._condition(where)
        statement = f"SELECT {_ROW} FROM episodes WHERE {condition} ORDER BY {self._sort(order, descending)}"
        if not where.text:
            page = f"{statement} LIMIT ? OFFSET ?"
            return map(self._row, self._query(page, [*values, -1 if limit is None else _clamp(limit), offset]))
        found = (row for row in map(self._row, self._query(statement, values)) if self._contains(row, where.text))
        return islice(found, offset, None if limit is None else offset + limit)

    def _row(self, values: Sequence[Any]) -> EpisodeRow:
        number, *rest, step, start_step, state = values
        known = dict(zip(COLUMNS, rest, strict=True))
        known |= {
            "outcome": None if known["outcome"] is None else Outcome(known["outcome"]),
            "success": None if known["success"] is None else bool(known["success"]),
            "is_trainable": bool(known["is_trainable"]),
            "truncated": bool(known["truncated"]),
            "roles": tuple(orjson.loads(known["roles"])),
            "split": self.splits.get(known["environment"]),
        }
        complete = state == EntryState.COMPLETE
        return EpisodeRow(number=number, step=step, start_step=start_step, complete=complete, **known)

    def _condition(self, where: EpisodeFilter) -> tuple[str, list[Any]]:
        """Return a filter as an SQL condition with its values."""
        parts, values = [_VALID], list[Any]()

        def add(condition: str, *given: Any) -> None:
            parts.append(condition)
            values.extend(map(_clamp, given))

        if where.complete is not None:
            add("state = ?", EntryState.COMPLETE if where.complete else EntryState.RUNNING)
        for name in _EQUAL:
            if (value := getattr(where, name)) is not None:
                add(f"{name} = ?", value)
        for name in _RANGES:
            least, most = ("first", "last") if name == "step" else ("least", "most")
            if (value := getattr(where, f"{least}_{name}")) is not None:
                add(f"{name} >= ?", value)
            if (value := getattr(where, f"{most}_{name}")) is not None:
                add(f"{name} <= ?", value)
        if where.split is not None:
            names = [name for name, split in self.splits.items() if split == where.split]
            add(f"environment IN ({_marks(names)})", *names)
        if where.outcomes is not None:
            add(f"outcome IN ({_marks(where.outcomes)})", *where.outcomes)
        if where.is_infrastructure is not None:
            failures = [outcome for outcome in Outcome if outcome.is_infrastructure]
            add(f"outcome {'' if where.is_infrastructure else 'NOT '}IN ({_marks(failures)})", *failures)
        if where.success is not None:
            add("success = 1" if where.success else "success IS NOT 1")
        if where.role is not None:
            add("EXISTS (SELECT 1 FROM json_each(roles) WHERE value = ?)", where.role)
        if where.has_sequences is not None:
            add("sequences > 0" if where.has_sequences else "sequences = 0")
        if where.invalid is not None:
            add("invalid > 0" if where.invalid else "invalid = 0")
        if where.truncated is not None:
            add("truncated = ?", where.truncated)
        if where.text:
            possible = self._may_contain(where.text, " AND ".join(parts), values)
            add("number IN (SELECT value FROM json_each(?))", orjson.dumps(possible).decode())
        return " AND ".join(parts), values

    def _may_contain(self, text: str, condition: str, values: Sequence[Any]) -> list[int]:
        """Return the numbers of the rows that fulfil a condition and whose text may contain `text`."""
        statement = f"""SELECT number, signature FROM episodes JOIN contents USING (number)
            WHERE {condition} AND number > ? ORDER BY number LIMIT {_SIGNATURES}"""
        found, last = list[int](), 0
        while rows := self._query(statement, [*values, last]):
            found += may_contain(rows, text)
            last = rows[-1][0]
        return found

    def _contains(self, row: EpisodeRow, text: str) -> bool:
        (last,) = read_pieces(self._paths, self._pieces(row)[-1:])
        header = last.get("trajectory", {})
        written = episode_text(header, last.get("messages"))
        if self._decode is not None and not last.get("messages"):
            sequences = self._read(row, messages=False).sequences
            written = "\n".join([written, *(self._decode(sequence.ids_list()) for sequence in sequences)])
        return text.casefold() in written.casefold()

    def _read(self, row: EpisodeRow, *, messages: bool) -> Trajectory:
        records = read_pieces(self._paths, self._pieces(row))
        if is_evaluated(records[0]):
            return trajectory_from_record(records[0]["trajectory"])
        start, *later = records
        images = self._images(later)
        parts = EpisodeParts(start["trajectory"], images)
        for record in later:
            parts.add(record["sequences"])
        if not row.complete:
            return parts.restore(parts.header, [])
        trajectory = parts.finish(later[-1])
        if messages and "messages" in later[-1]:
            trajectory.episode_messages = EpisodeMessages.from_record(later[-1]["messages"], images)
        return trajectory

    def _pieces(self, row: EpisodeRow) -> list[Piece]:
        found = self._query(f"SELECT pieces {_CONTENT}", [row.number, row.id])
        if not found:
            raise KeyError("the index was rebuilt")
        return unpack_pieces(found[0][0])

    def _images(self, records: Sequence[Mapping[str, Any]]) -> dict[str, ImagePart]:
        """Return the images that records name, by checksum."""
        found = {}
        for checksum in {name for record in records for name in _checksums(record)}:
            places = self._query("SELECT step, offset, length FROM images WHERE checksum = ? LIMIT 1", [checksum])
            for record in read_pieces(self._paths, [Piece(*place) for place in places]):
                found[checksum] = image_from_record(record["image"])
        return found


def _read_evaluated(paths: Mapping[int, Path], pieces: Sequence[Piece]) -> Mapping[str, Any]:
    """Read the record of an evaluation's trajectory."""
    try:
        (record,) = read_pieces(paths, pieces)
        trajectory: Mapping[str, Any] = record["trajectory"]
    except (*UNREADABLE, OSError) as error:
        raise UsageError(
            f"an episode cannot be read from {paths[pieces[0].step]}", got=error, hint="the file has changed since"
        ) from error
    return trajectory


def _clamp(value: Any) -> Any:
    """Clamp an integer to SQLite's range."""
    return max(-_MAX_INT64, min(_MAX_INT64, value)) if isinstance(value, int) and not isinstance(value, bool) else value


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))


def _checksums(value: object) -> Iterator[str]:
    """Yield the checksums of images in a record, except in its arrays of numbers."""
    if isinstance(value, Mapping):
        yield from (value[name] for name in ("checksum", "image") if isinstance(value.get(name), str))
        for name, inner in value.items():
            if name not in ("token_ids", "sources", "logprobs", "versions", "routes"):
                yield from _checksums(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _checksums(inner)
