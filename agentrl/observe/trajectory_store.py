"""Every episode on disk, turn by turn, while it runs.

Files are append-only JSON lines, ``trajectories/step-000012.jsonl`` for what happened during training step 12. Three
kinds of records with the trajectory's ``id``:

- ``start``: an attempt begins: task, seed, group, attempt. What was written for the same id before is void.
- ``turn``: a turn is complete: the tokens that each sequence has gained since the last record.
- ``end``: outcome, reward, metrics, the table of turns, and the tokens after the last turn.

An ``image`` record has the image's checksum as ``id`` and stands once in a file, before the tokens that stand for it.

An id has one episode: that of its last ``start``. A run that is interrupted ends its episodes as ``cancelled``, and
plays them again under the same ids when it is resumed; readers then get the new ones only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from agentrl.errors import UsageError
from agentrl.image import image_from_record, image_record
from agentrl.message import ImagePart
from agentrl.observe.files import (
    UNREADABLE,
    JsonLinesWriter,
    first_free,
    numbered_records,
    replace_file,
    warn_damaged,
    writing,
)
from agentrl.observe.run_folder import step_name, step_of
from agentrl.trajectory import TokenSequence, Trajectory, Turn

_log = logging.getLogger(__name__)
_SUFFIX = ".jsonl"
_MOST_NEW = 10_000
"""Branches that one record may begin."""


class TrajectoryStore:
    """Writes trajectories. A record reaches the operating system before the call returns, and the disk at `rotate`.

    As a context manager it closes itself; an error that is on its way already is not replaced by one of closing.

    Args:
        folder: The run's ``trajectories``.
        step: The training step that begins.

    Raises:
        UsageError: every method, when the disk is full.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        self._folder = folder
        self._written: dict[str, list[int]] = {}
        self._images: set[str] = set()
        self._file = JsonLinesWriter(step_file(folder, step))

    def start(self, trajectory: Trajectory) -> None:
        """Write that an attempt begins."""
        self._written[trajectory.id] = []
        self._file.append({"kind": "start", "id": trajectory.id, "trajectory": _header(trajectory.to_record())})

    def turn(self, trajectory: Trajectory, turn: Turn) -> None:
        """Write a complete turn."""
        tokens = self._new_tokens(trajectory)
        self._file.append({"kind": "turn", "id": trajectory.id, "turn": turn.index, "sequences": tokens})

    def end(self, trajectory: Trajectory) -> None:
        """Write that an attempt ended."""
        tokens = self._new_tokens(trajectory)
        del self._written[trajectory.id]
        record = trajectory.to_record()
        turns = [sequence["turns"] for sequence in record["sequences"]]
        lengths = [len(sequence) - sequence.shared for sequence in trajectory.sequences]
        end = {"trajectory": _header(record), "sequences": tokens, "turns": turns, "lengths": lengths}
        self._file.append({"kind": "end", "id": trajectory.id, **end})

    def rotate(self, step: int) -> None:
        """Go on in the file of another training step; the old one is made durable."""
        self.sync()
        finished, self._file = self._file, JsonLinesWriter(step_file(self._folder, step))
        finished.close()
        self._images.clear()

    def sync(self) -> None:
        """Make everything written so far survive a power cut."""
        self._file.sync()

    @property
    def position(self) -> int:
        """Bytes in the current step's file."""
        return self._file.position

    def close(self) -> None:
        """Sync and close."""
        try:
            self.sync()
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except UsageError:
            if error is None:
                raise
            _log.exception("the trajectories could not be made durable")

    def _new_tokens(self, trajectory: Trajectory) -> list[dict[str, Any]]:
        """Collect the tokens of each sequence that no record holds yet, and advance the written counts."""
        written = self._written.setdefault(trajectory.id, [])
        written.extend([0] * (len(trajectory.sequences) - len(written)))
        pieces = []
        for number, sequence in enumerate(trajectory.sequences):
            own = len(sequence) - sequence.shared
            if own == written[number]:
                continue
            self._write_images(sequence.own_images(written[number]))
            pieces.append(_piece(trajectory, number, sequence, written[number]))
            written[number] = own
        return pieces

    def _write_images(self, images: list[ImagePart]) -> None:
        for image in images:
            if image.checksum not in self._images:
                self._images.add(image.checksum)
                self._file.append({"kind": "image", "id": image.checksum, "image": image_record(image)})


def step_file(folder: Path, step: int) -> Path:
    """Return the file of a training step."""
    return folder / step_name(step, _SUFFIX)


def step_files(folder: Path) -> list[Path]:
    """Find the files of all training steps, in the order of steps; files of other names are not the store's."""
    if not folder.is_dir():
        return []
    numbered = ((step_of(path.name, _SUFFIX), path) for path in folder.iterdir() if path.is_file())
    return [path for _, path in sorted((step, path) for step, path in numbered if step is not None)]


def void_after(folder: Path, step: int, position: int) -> None:
    """Set aside what a killed run wrote after its checkpoint, before those episodes are played again.

    It moves into the folder ``void``, where `read_trajectories` does not look.

    Args:
        folder: The run's ``trajectories``.
        step: The step that was running at the checkpoint.
        position: Bytes in that step's file at the checkpoint; later files are void as a whole.
    """
    for file in step_files(folder):
        number, size = _step_of(file), file.stat().st_size
        keep = position if number == step else 0
        if size < keep:
            _log.warning("%s has lost its end: %d of %d bytes are there", file, size, keep)
        if number < step or size <= keep:
            continue
        with writing(file):
            void = folder / "void"
            void.mkdir(exist_ok=True)
            target = first_free(void / f"{file.stem}-{attempt}{file.suffix}" for attempt in count(1))
            data = file.read_bytes()
            target.write_bytes(data[keep:])
            replace_file(file, data[:keep])


def _step_of(file: Path) -> int:
    """Return the step of a file; 0 for a file with another name."""
    return step_of(file.name, _SUFFIX) or 0


def _piece(trajectory: Trajectory, number: int, sequence: TokenSequence, start: int) -> dict[str, Any]:
    piece: dict[str, Any] = {"sequence": number, "from": start, **sequence.own_arrays(start)}
    if start == 0 and sequence.parent is not None:
        piece["parent"] = next(i for i, other in enumerate(trajectory.sequences) if other is sequence.parent)
        piece["shared"] = sequence.shared
    return piece


def _header(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("sequences", "images")}


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """A trajectory as read back."""

    trajectory: Trajectory
    step: int
    """Training step during which its last record was written."""
    complete: bool
    """It ended; otherwise this is what was known when its process died, without the table of turns."""


def read_trajectories(source: Path, *, unfinished: bool = False) -> Iterator[StoredTrajectory]:
    """Read the trajectories of a store, in the order in which they ended; then, if asked for, the unfinished ones.

    Episodes with damaged records are left out with a warning.

    Args:
        source: The store's folder, or one of its files.
        unfinished: Whether to give episodes without an end, too.
    """
    files = step_files(source) if source.is_dir() else [source]
    reader = _Reader(_last_starts(files))
    for file in files:
        yield from reader.read(file)
    if unfinished:
        yield from reader.unfinished(_step_of(files[-1]) if files else 0)


_Position: TypeAlias = tuple[int, int]
"""File and line of a record; positions compare in the order of writing."""


def _last_starts(files: Sequence[Path]) -> dict[str, _Position]:
    """Find where the last attempt under each id begins: earlier records of the id are void."""
    found: dict[str, _Position] = {}
    for number, file in enumerate(files):
        for line, record in numbered_records(file, [], containing=b'"start"'):
            if record.get("kind") == "start" and isinstance(record.get("id"), str):
                found[record["id"]] = (number, line)
    return found


class _Reader:
    """Puts episodes together from the records of all files, which it is given in order."""

    def __init__(self, last_starts: Mapping[str, _Position]) -> None:
        self._last_starts = last_starts
        self._running: dict[str, _Parts] = {}
        self._images: dict[str, ImagePart] = {}
        self._files = 0

    def read(self, file: Path) -> Iterator[StoredTrajectory]:
        """Read one file; gives the episodes that end in it."""
        damaged: list[int] = []
        for line, record in numbered_records(file, damaged):
            try:
                ended = self._take(record, (self._files, line))
            except UNREADABLE:
                self._running.pop(str(record.get("id")), None)
                damaged.append(line)
                continue
            if ended is not None:
                yield StoredTrajectory(ended, _step_of(file), complete=True)
        self._files += 1
        warn_damaged(file, sorted(damaged))

    def unfinished(self, step: int) -> Iterator[StoredTrajectory]:
        """Give what is known of the episodes that have not ended."""
        for parts in self._running.values():
            try:
                known = parts.restore(parts.header, [])
            except UNREADABLE:  # an image of it was damaged, which has been said
                continue
            yield StoredTrajectory(known, step, complete=False)

    def _take(self, record: Mapping[str, Any], place: _Position) -> Trajectory | None:
        """Take note of a record; the episode, if the record ends it."""
        identity = record["id"]
        match record["kind"]:
            case "start":
                if place >= self._last_starts.get(identity, place):
                    self._running[identity] = _Parts(record["trajectory"], self._images)
            case "image":
                self._images[identity] = image_from_record(record["image"])
            case "turn" | "end" if identity in self._running:
                parts = self._running[identity]
                parts.add(record["sequences"])
                if record["kind"] == "end":
                    del self._running[identity]
                    return parts.finish(record)
        return None


class _Parts:
    """Records of one attempt, read so far."""

    def __init__(self, header: Mapping[str, Any], images: Mapping[str, ImagePart]) -> None:
        self.header = header
        self._images = images
        self._sequences: list[dict[str, Any]] = []

    def add(self, pieces: list[dict[str, Any]]) -> None:
        for piece in pieces:
            if not 0 <= piece["sequence"] < len(self._sequences) + _MOST_NEW:
                raise ValueError("no record begins so many branches")
            while piece["sequence"] >= len(self._sequences):
                self._sequences.append(
                    {"parent": None, "shared": 0, "token_ids": [], "sources": [], "logprobs": [], "versions": []}
                )
            row = self._sequences[piece["sequence"]]
            if piece.get("from", len(row["token_ids"])) != len(row["token_ids"]):
                raise ValueError("a record of this episode is missing")
            for name in ("token_ids", "sources", "logprobs", "versions"):
                row[name].extend(piece[name])
            row.setdefault("images", []).extend(piece.get("images", ()))
            row.setdefault("routes", []).extend(piece.get("routes", ()))
            row["parent"] = piece.get("parent", row["parent"])
            row["shared"] = piece.get("shared", row["shared"])

    def finish(self, end: Mapping[str, Any]) -> Trajectory:
        lengths = [len(row["token_ids"]) for row in self._sequences]
        told = end.get("lengths", lengths)
        if told[: len(lengths)] != lengths or any(told[len(lengths) :]):
            raise ValueError("a record of this episode is missing")
        return self.restore(end["trajectory"], end["turns"])

    def restore(self, header: Mapping[str, Any], turns: list[list[Any]]) -> Trajectory:
        rows = [{**row, "turns": turns[i] if i < len(turns) else []} for i, row in enumerate(self._sequences)]
        places = (place for row in rows for place in row.get("images", ()))
        images = {place["checksum"]: image_record(self._images[place["checksum"]]) for place in places}
        return Trajectory.from_record({**header, "sequences": rows, "images": images})
