"""Entries that an index keeps of a store: one entry per attempt of an episode, updated record by record."""

from __future__ import annotations

import enum
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from agentrl.errors import Outcome
from agentrl.observe.files import UNREADABLE, DamagedRecord, decode_record
from agentrl.observe.trajectory_record import record_outline
from agentrl.trajectory import Source

CHUNK = 32 * 2**20
"""Bytes that are scanned at a time."""
TAIL = 4096
"""Bytes before the scanned position whose checksum is compared before a file is scanned further."""
_MAX_SIGNATURE, _MIN_SIGNATURE = 2**15, 2**9
"""Bits of a signature before and after folding."""
_FACTOR = np.uint32(2654435761)
"""Knuth's multiplier, which spreads the hashes of trigrams."""


class EntryState(enum.IntEnum):
    """State of an attempt."""

    RUNNING = 0
    COMPLETE = 1
    DAMAGED = 2
    """A record is missing or malformed, so that the episode cannot be read."""


class Piece(NamedTuple):
    """Place of a record."""

    step: int
    """Step of the file."""
    offset: int
    length: int


def pack_pieces(pieces: Sequence[Piece]) -> bytes:
    """Return pieces as bytes."""
    return array("q", [number for piece in pieces for number in piece]).tobytes()


def unpack_pieces(data: bytes) -> list[Piece]:
    """Return the pieces of `pack_pieces`."""
    numbers = array("q", data)
    return [Piece(*numbers[start : start + 3]) for start in range(0, len(numbers), 3)]


class Line(NamedTuple):
    """A record and its place."""

    piece: Piece
    record: dict[str, Any] | None
    """``None`` for a damaged line."""
    has_checksum: bool


def scan_lines(file: BinaryIO, step: int, position: int, *, end: int, needs_checksum: bool) -> Iterator[Line]:
    """Read the complete lines of a file from `position` to `end` or to the first one after `CHUNK` bytes."""
    file.seek(position)
    limit = min(end, position + CHUNK)
    while position < limit:
        line = file.readline(end - position)
        if not line.endswith(b"\n"):
            return
        piece = Piece(step, position, len(line))
        position += len(line)
        try:
            record = decode_record(line, needs_checksum=needs_checksum)
        except DamagedRecord:
            yield Line(piece, None, False)
            continue
        has_checksum = b'"crc32:' in line[-40:]
        needs_checksum = needs_checksum or has_checksum
        yield Line(piece, record, has_checksum)


def tail_checksum(file: BinaryIO, position: int) -> int:
    """Return the checksum of the last `TAIL` bytes before a position."""
    file.seek(max(0, position - TAIL))
    return zlib.crc32(file.read(min(position, TAIL)))


@dataclass(slots=True, kw_only=True)
class IndexEntry:
    """Entry of one attempt of an episode."""

    number: int | None = None
    """Row number; ``None`` for a new entry."""
    state: EntryState = EntryState.RUNNING
    voided_by: int | None = None
    """Step of the file with a later attempt of the same id, which makes this one void."""
    pieces: list[Piece] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Own tokens of each sequence so far."""
    shared: list[int] = field(default_factory=list)
    """Tokens that each sequence shares with its parent."""
    images: set[str] = field(default_factory=set)
    """Checksums of the images among the tokens."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Values of the other columns."""

    @classmethod
    def start(cls, record: Mapping[str, Any], piece: Piece) -> IndexEntry:
        """Return the entry of a ``start`` record."""
        entry = cls(pieces=[piece], columns={**_EMPTY, "id": record["id"], "started_at": record.get("time")})
        entry.read_header(record["trajectory"])
        return entry

    def add_turn(self, record: Mapping[str, Any], piece: Piece) -> None:
        """Add a ``turn`` record; a malformed one raises one of `UNREADABLE`."""
        self.pieces.append(piece)
        self._add_tokens(record["sequences"])
        self.columns["turns"] += 1

    def end(self, record: Mapping[str, Any], piece: Piece, known_images: Set[str]) -> None:
        """Add an ``end`` record; a malformed one, or one without its images, raises one of `UNREADABLE`."""
        self.pieces.append(piece)
        self._add_tokens(record["sequences"])
        written = record.get("lengths", self.lengths)
        if written[: len(self.lengths)] != self.lengths or any(written[len(self.lengths) :]):
            raise ValueError("a record of this episode is missing")
        if not self.images <= known_images:
            raise ValueError("an image of this episode is missing")
        self.columns["ended_at"] = record.get("time")
        self.finish(record["trajectory"], record["turns"], record.get("messages"))

    @classmethod
    def from_evaluation(cls, record: Mapping[str, Any], piece: Piece) -> IndexEntry:
        """Return the entry of an evaluation's episode; a malformed record raises one of `UNREADABLE`."""
        trajectory = record["trajectory"]
        ended = float(record.get("played_at", 0.0)) or None
        entry = cls(pieces=[piece], columns={**_EMPTY, "id": trajectory["id"], "ended_at": ended})
        entry.read_header(trajectory)
        for number, sequence in enumerate(trajectory["sequences"]):
            entry._add_tokens([{**sequence, "sequence": number}])
        entry.finish(trajectory, [sequence["turns"] for sequence in trajectory["sequences"]], None)
        outline = zlib.compress(orjson.dumps(record_outline(trajectory)), 1)
        entry.columns |= {"member": int(record["sample"]), "task_digest": str(record["task"]), "outline": outline}
        return entry

    def read_header(self, header: Mapping[str, Any]) -> None:
        """Read the columns that are known at the start."""
        names = ("task_id", "environment", "group_id", "attempt", "task_type")
        member = str(self.columns["id"]).rpartition(".")[0].rpartition("/")[2]
        self.columns |= {name: header[name] for name in names}
        self.columns["member"] = int(member) if member.isdecimal() else None

    def finish(self, header: Mapping[str, Any], turns: Sequence[Sequence[Mapping[str, Any]]], messages: object) -> None:
        """Read the columns that are known at the end."""
        played = [turn for rows in turns for turn in rows]
        outcome = None if header["outcome"] is None else Outcome(header["outcome"])
        cut = any(turn["stop_reason"] == "length" for turn in played)
        self.read_header(header)
        self.columns |= {
            "outcome": header["outcome"],
            "is_trainable": outcome is not None and outcome.is_trainable and header["reward"] is not None,
            "error": header["error"],
            "reward": header["reward"],
            "success": header["success"],
            "turns": len(played),
            "roles": orjson.dumps(list(dict.fromkeys(turn["role"] for turn in played))).decode(),
            "invalid": sum(not turn["valid"] for turn in played),
            "truncated": cut or (outcome is not None and outcome.is_truncated),
            "seconds": header["metrics"].get("seconds"),
            "signature": sign_text(episode_text(header, messages)),
        }
        self.state = EntryState.COMPLETE

    def _add_tokens(self, sequences: Sequence[Mapping[str, Any]]) -> None:
        for piece in sequences:
            number, ids, sources = piece["sequence"], piece["token_ids"], piece["sources"]
            if not 0 <= number < len(self.lengths) + 10_000:
                raise ValueError("a record has too many new branches")
            self.lengths += [0] * (number + 1 - len(self.lengths))
            self.shared += [0] * (number + 1 - len(self.shared))
            self.shared[number] = piece.get("shared", self.shared[number])
            if piece.get("from", self.lengths[number]) != self.lengths[number]:
                raise ValueError("a record of this episode is missing")
            self.lengths[number] += len(ids)
            self.images.update(place["checksum"] for place in piece.get("images", ()))
            self._count(ids, sources, piece["logprobs"], piece["versions"])
            self.columns["longest"] = max(self.columns["longest"], self.lengths[number] + self.shared[number])
        self.columns["sequences"] = len(self.lengths)
        self.columns["tokens"] = sum(self.lengths)

    def _count(self, ids: list[int], sources: list[int], logprobs: list[float | None], versions: list[int]) -> None:
        sampled = sources.count(Source.SAMPLED)
        self.columns["sampled_tokens"] += sampled
        self.columns["missing_logprobs"] += max(0, sampled - (len(logprobs) - logprobs.count(None)))
        self.columns["largest_id"] = max(self.columns["largest_id"], max(ids, default=0))
        if sampled:
            found = {version for version in set(versions) if version >= 0} or {0}
            oldest, newest = self.columns["oldest_version"], self.columns["newest_version"]
            self.columns["oldest_version"] = min(found if oldest is None else {oldest, *found})
            self.columns["newest_version"] = max(found if newest is None else {newest, *found})


_EMPTY: Mapping[str, Any] = {
    **dict.fromkeys(("turns", "sequences", "tokens", "sampled_tokens", "longest", "missing_logprobs", "largest_id"), 0),
    **dict.fromkeys(("oldest_version", "newest_version", "outcome", "error", "reward", "success", "seconds"), None),
    **dict.fromkeys(("invalid", "truncated", "is_trainable"), 0),
    **dict.fromkeys(("started_at", "ended_at", "task_digest", "signature", "outline"), None),
    "roles": "[]",
}


def is_evaluated(record: Mapping[str, Any]) -> bool:
    """Return True for a record of an evaluation's file, which holds a whole episode."""
    return "kind" not in record and "sample" in record


class StoreScan:
    """Scan of records, in their order, into entries.

    Args:
        running: Entries that earlier scans left running.
        images: Checksums of the images that earlier scans have found.
    """

    def __init__(self, running: Sequence[IndexEntry], images: Iterable[str]) -> None:
        self._known_images = set(images)
        self._latest = {str(entry.columns["id"]): entry for entry in running}
        self.entries = list(running)
        """All entries that this scan has changed or may change."""
        self.voided: list[tuple[int, str]] = []
        """Step and id of each start, which voids earlier entries of the id."""
        self.images: list[tuple[str, Piece]] = []
        """Checksums and places of images."""
        self.damaged: list[Piece] = []
        """Places of damaged records."""

    def add(self, line: Line) -> None:
        """Process a record."""
        record = line.record
        if record is None:
            if line.piece.length > 1:  # an empty line follows an unfinished one in a truncated file
                self.damaged.append(line.piece)
            return
        try:
            self._add(record, line.piece)
        except UNREADABLE:
            self.damaged.append(line.piece)
            broken = self._latest.get(str(record.get("id")))
            if broken is not None and broken.state is EntryState.RUNNING:
                broken.state = EntryState.DAMAGED

    def _add(self, record: Mapping[str, Any], piece: Piece) -> None:
        if is_evaluated(record):
            self.entries.append(IndexEntry.from_evaluation(record, piece))
            return
        identity = record["id"]
        entry = self._latest.get(identity)
        match record["kind"]:
            case "start":
                self._start(IndexEntry.start(record, piece))
            case "image":
                self.images.append((identity, piece))
                self._known_images.add(identity)
            case "turn" if entry is not None and entry.state is EntryState.RUNNING:
                entry.add_turn(record, piece)
            case "end" if entry is not None and entry.state is EntryState.RUNNING:
                entry.end(record, piece, self._known_images)

    def _start(self, entry: IndexEntry) -> None:
        identity, step = entry.columns["id"], entry.pieces[0].step
        if (earlier := self._latest.get(identity)) is not None:
            earlier.voided_by = step
        self.voided.append((step, identity))
        self.entries.append(entry)
        self._latest[identity] = entry


def episode_text(header: Mapping[str, Any], messages: object) -> str:
    """Return the text of an episode: its messages or its transcript, and its error."""
    return "\n".join(_texts([messages, header.get("transcript"), header.get("error")]))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in ("role", "id", "checksum"):
                yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def sign_text(text: str) -> bytes | None:
    """Return a signature of a text: a Bloom filter of its trigrams of bytes without case; ``None`` for no text.

    `may_contain` uses it to leave out most texts without a pattern. A trigram index of SQLite finds them faster, but
    takes six times as long to build for long texts, and more space.
    """
    hashes = _trigrams(text)
    if not hashes.size:
        return None if not text else bytes(_MIN_SIGNATURE // 8)
    table: npt.NDArray[np.bool_] = np.zeros(_MAX_SIGNATURE, dtype=np.bool_)
    table[hashes & np.uint32(_MAX_SIGNATURE - 1)] = True
    wanted = 8 * int(table.sum())
    while table.size > max(wanted, _MIN_SIGNATURE):
        table = np.logical_or(*np.split(table, 2))
    return np.packbits(table, bitorder="little").tobytes()


def may_contain(signatures: Iterable[tuple[int, bytes | None]], pattern: str) -> list[int]:
    """Return the numbers of the signatures whose texts may contain a pattern; texts without a signature may."""
    by_size: dict[int, list[tuple[int, bytes]]] = {}
    for number, signature in signatures:
        data = signature or b""
        by_size.setdefault(len(data), []).append((number, data))
    found = [number for number, _ in by_size.pop(0, ())]
    hashes = _trigrams(pattern)[:24]  # few are enough
    for size, same in by_size.items():
        bits = hashes & np.uint32(8 * size - 1)
        table = np.frombuffer(b"".join([data for _, data in same]), dtype=np.uint8).reshape(-1, size)
        is_set = table[:, bits >> np.uint32(3)] >> (bits & np.uint32(7)).astype(np.uint8) & np.uint8(1)
        found += [same[place][0] for place in np.flatnonzero(is_set.all(axis=1))]
    return found


def _trigrams(text: str) -> npt.NDArray[np.uint32]:
    data = np.frombuffer(text.casefold().encode("utf-8", "backslashreplace"), dtype=np.uint8).astype(np.uint32)
    if data.size < 3:
        return np.zeros(0, dtype=np.uint32)
    joined = data[:-2] | data[1:-1] << np.uint32(8) | data[2:] << np.uint32(16)
    return np.asarray((joined * _FACTOR) >> np.uint32(8), dtype=np.uint32)


def read_pieces(paths: Mapping[int, Path], pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Read the records of pieces, from the files by step.

    Raises:
        DamagedRecord: the bytes at a place are not a record.
        KeyError: the index has no such file.
        OSError: a file is gone.
    """
    records = []
    for step, group in groupby(pieces, key=lambda piece: piece.step):
        with paths[step].open("rb") as file:
            for piece in group:
                file.seek(piece.offset)
                records.append(decode_record(file.read(piece.length)))
    return records
