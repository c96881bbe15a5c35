"""Storage of every episode, turn by turn, during rollouts.

Files are append-only JSON Lines, ``trajectories/step-000012.jsonl`` for everything during training step 12. Three kinds
of records have the trajectory's ``id``:

- ``start``: start of an attempt: task, seed, group, attempt. Earlier records with the same id are void.
- ``turn``: a complete turn: the new tokens of each sequence since the last record.
- ``end``: outcome, reward, metrics, the table of turns, the tokens after the last turn, and the messages that scorers
  read, if there are any.

``start`` and ``end`` have the ``time`` in seconds since 1970.

An ``image`` record has the image's checksum as ``id``. It occurs once in a file, before the image's tokens.

A ``group`` record has the fate of a group (`GroupEnd`) during the file's training step. The last record of an id
counts: a group that a finished run left over trains if the run is resumed with more steps.

An id has one episode, which begins with its last ``start``. An interrupted run ends its episodes as ``cancelled``, and
plays them again under the same ids after it is resumed; readers then get only the new ones.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from agentrl.errors import UsageError
from agentrl.message import EpisodeMessages, ImagePart
from agentrl.message.image import image_from_record, image_record
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
from agentrl.observe.trajectory_record import trajectory_from_record, trajectory_record
from agentrl.trajectory import TokenSequence, Trajectory, Turn

VOID = "void"
"""Folder for the records that killed runs wrote after their last checkpoints."""
_log = logging.getLogger(__name__)
_SUFFIX = ".jsonl"
_MAX_NEW = 10_000
"""Maximum number of new branches in one record."""


class GroupEnd(enum.StrEnum):
    """Fate of a group of episodes that was started; the last record of a group counts."""

    TRAINED = "trained"
    """Its trainable episodes were trained on in the training step of the file."""
    FAILED = "failed"
    """Too many of its episodes had infrastructure failures; each failed episode contains its error."""
    FILTERED = "filtered"
    """Dynamic sampling replaced it, because its returns do not differ."""
    STALE = "stale"
    """Its oldest token was more than `rollout.max_staleness` versions old."""
    EXPIRED = "expired"
    """Live traffic: the session got no feedback."""
    LEFT_OVER = "left over"
    """The run ended before the group was needed or complete."""


class TrajectoryStore:
    """Writer of trajectories. Records are passed to the operating system immediately, and synced to disk at `rotate`.

    As a context manager it closes itself; an error from closing does not replace another exception.

    Raises:
        UsageError: from every method, if the disk is full.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        self._folder = folder
        self._written: dict[str, list[int]] = {}
        self._images: set[str] = set()
        self._file = JsonLinesWriter(step_file(folder, step))

    def start(self, trajectory: Trajectory) -> None:
        """Write the start of an attempt."""
        self._written[trajectory.id] = []
        header = _header(trajectory_record(trajectory))
        self._file.append({"kind": "start", "id": trajectory.id, "time": time.time(), "trajectory": header})

    def turn(self, trajectory: Trajectory, turn: Turn) -> None:
        """Write a complete turn."""
        tokens = self._new_tokens(trajectory)
        self._file.append({"kind": "turn", "id": trajectory.id, "turn": turn.index, "sequences": tokens})

    def end(self, trajectory: Trajectory) -> None:
        """Write the end of an attempt."""
        tokens = self._new_tokens(trajectory)
        del self._written[trajectory.id]
        record = trajectory_record(trajectory)
        turns = [sequence["turns"] for sequence in record["sequences"]]
        lengths = [len(sequence) - sequence.shared for sequence in trajectory.sequences]
        end = {"trajectory": _header(record), "sequences": tokens, "turns": turns, "lengths": lengths}
        now = {"time": time.time()}
        self._file.append({"kind": "end", "id": trajectory.id, **now, **end, **self._messages(trajectory)})

    def group(self, group_id: str, end: GroupEnd, episodes: Sequence[str]) -> None:
        """Write the fate of a group: `episodes` are those that trained or, if none did, those that ended."""
        self._file.append({"kind": "group", "id": group_id, "end": end.value, "episodes": list(episodes)})

    def rotate(self, step: int) -> None:
        """Continue in the file of another training step; the old file is synced to disk."""
        self.sync()
        finished, self._file = self._file, JsonLinesWriter(step_file(self._folder, step))
        finished.close()
        self._images.clear()

    def sync(self) -> None:
        """Sync the file to disk, so that it survives a power failure."""
        self._file.sync()

    @property
    def position(self) -> int:
        """Size of the current step's file in bytes."""
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
        """Return the unwritten tokens of each sequence, and advance the written counts."""
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

    def _messages(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return the entry of an episode's messages; empty if there are none."""
        messages = trajectory.episode_messages
        if not messages.conversations:
            return {}
        self._write_images(messages.images())
        return {"messages": messages.to_record()}

    def _write_images(self, images: list[ImagePart]) -> None:
        for image in images:
            if image.checksum not in self._images:
                self._images.add(image.checksum)
                self._file.append({"kind": "image", "id": image.checksum, "image": image_record(image)})


def step_file(folder: Path, step: int) -> Path:
    """Return the file of a training step."""
    return folder / step_name(step, _SUFFIX)


def step_files(folder: Path) -> list[Path]:
    """Return the files of all training steps, in the order of steps; files with other names are ignored."""
    if not folder.is_dir():
        return []
    numbered = ((step_of(path.name, _SUFFIX), path) for path in folder.iterdir() if path.is_file())
    return [path for _, path in sorted((step, path) for step, path in numbered if step is not None)]


def void_after(folder: Path, step: int, position: int) -> None:
    """Move the records that a killed run wrote after its checkpoint into the folder `VOID`.

    Their episodes will be played again. `read_trajectories` does not read them.

    Args:
        folder: The run's ``trajectories``.
        step: Training step at the checkpoint.
        position: Size of that step's file in bytes at the checkpoint; later files are void.
    """
    for file in step_files(folder):
        number, size = _step_of(file), file.stat().st_size
        keep = position if number == step else 0
        if size < keep:
            _log.warning("%s is truncated: only %d of %d bytes are left", file, size, keep)
        if number < step or size <= keep:
            continue
        with writing(file):
            void = folder / VOID
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
    """A trajectory from the store."""

    trajectory: Trajectory
    step: int
    """Training step during which its last record was written."""
    complete: bool
    """True if the episode ended; otherwise the trajectory holds its last state, without the table of turns."""


def read_trajectories(
    source: Path, *, unfinished: bool = False, messages: bool = False, first_step: int = 0
) -> Iterator[StoredTrajectory]:
    """Read the trajectories of a store, in the order in which they ended; unfinished ones come last.

    Episodes with damaged records are skipped with a warning.

    Args:
        source: The store's folder, or one of its files.
        unfinished: True to include unfinished episodes.
        messages: True to restore the messages that scorers read, for `Trajectory.messages` and the like.
        first_step: First training step whose file is read, if `source` is a folder.
    """
    files = [source]
    if source.is_dir():
        files = [file for file in step_files(source) if _step_of(file) >= first_step]
    reader = _Reader(_last_starts(files), messages=messages)
    for file in files:
        yield from reader.read(file)
    if unfinished:
        yield from reader.read_unfinished(_step_of(files[-1]) if files else 0)


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Fate of a group."""

    id: str
    end: GroupEnd
    step: int
    """Training step during which the record was written: that of the update, if the group trained."""
    episodes: tuple[str, ...]
    """Ids of the episodes that trained; of all that ended if the group did not train."""


def read_groups(folder: Path) -> dict[str, StoredGroup]:
    """Read the fate of each group of a run, by the group's id; damaged records are skipped with a warning."""
    found: dict[str, StoredGroup] = {}
    for file in step_files(folder):
        damaged: list[int] = []
        for line, record in numbered_records(file, damaged, containing=b'"group"'):
            if record.get("kind") != "group":
                continue
            try:
                group = StoredGroup(record["id"], GroupEnd(record["end"]), _step_of(file), tuple(record["episodes"]))
                found[group.id] = group
            except UNREADABLE:
                damaged.append(line)
        warn_damaged(file, damaged)
    return found


_Position: TypeAlias = tuple[int, int]
"""File and line of a record; positions compare in the order of writing."""


def _last_starts(files: Sequence[Path]) -> dict[str, _Position]:
    """Return the start of the last attempt of each id; earlier records of the id are void."""
    found: dict[str, _Position] = {}
    for number, file in enumerate(files):
        for line, record in numbered_records(file, [], containing=b'"start"'):
            if record.get("kind") == "start" and isinstance(record.get("id"), str):
                found[record["id"]] = (number, line)
    return found


class _Reader:
    """Reader that assembles episodes from the records of all files, which must be read in order."""

    def __init__(self, last_starts: Mapping[str, _Position], *, messages: bool) -> None:
        self._last_starts = last_starts
        self._with_messages = messages
        self._running: dict[str, EpisodeParts] = {}
        self._images: dict[str, ImagePart] = {}
        self._files = 0

    def read(self, file: Path) -> Iterator[StoredTrajectory]:
        """Read one file, and yield the episodes that end in it."""
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

    def read_unfinished(self, step: int) -> Iterator[StoredTrajectory]:
        """Yield the episodes that have not ended."""
        for parts in self._running.values():
            try:
                known = parts.restore(parts.header, [])
            except UNREADABLE:  # a damaged image, which has been reported already
                continue
            yield StoredTrajectory(known, step, complete=False)

    def _take(self, record: Mapping[str, Any], place: _Position) -> Trajectory | None:
        """Process a record; return the episode if the record ends it."""
        identity = record["id"]
        match record["kind"]:
            case "start":
                if place >= self._last_starts.get(identity, place):
                    self._running[identity] = EpisodeParts(record["trajectory"], self._images)
            case "image":
                self._images[identity] = image_from_record(record["image"])
            case "turn" | "end" if identity in self._running:
                parts = self._running[identity]
                parts.add(record["sequences"])
                if record["kind"] == "end":
                    del self._running[identity]
                    return self._finish(parts, record)
        return None

    def _finish(self, parts: EpisodeParts, end: Mapping[str, Any]) -> Trajectory:
        trajectory = parts.finish(end)
        if self._with_messages and "messages" in end:
            trajectory.episode_messages = EpisodeMessages.from_record(end["messages"], self._images)
        return trajectory


class EpisodeParts:
    """Records of one attempt, read so far.

    `images` are by checksum, at least those of the records.
    """

    def __init__(self, header: Mapping[str, Any], images: Mapping[str, ImagePart]) -> None:
        self.header = header
        self._images = images
        self._sequences: list[dict[str, Any]] = []

    def add(self, pieces: list[dict[str, Any]]) -> None:
        """Append the ``sequences`` of a record; a missing or impossible one raises one of `UNREADABLE`."""
        for piece in pieces:
            if not 0 <= piece["sequence"] < len(self._sequences) + _MAX_NEW:
                raise ValueError("a record has too many new branches")
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
        """Return the episode of an ``end`` record, whose ``sequences`` were added."""
        lengths = [len(row["token_ids"]) for row in self._sequences]
        written = end.get("lengths", lengths)
        if written[: len(lengths)] != lengths or any(written[len(lengths) :]):
            raise ValueError("a record of this episode is missing")
        return self.restore(end["trajectory"], end["turns"])

    def restore(self, header: Mapping[str, Any], turns: list[list[Any]]) -> Trajectory:
        """Return the episode as far as it was read, with the turns of each sequence."""
        rows = [{**row, "turns": turns[i] if i < len(turns) else []} for i, row in enumerate(self._sequences)]
        places = (place for row in rows for place in row.get("images", ()))
        images = {place["checksum"]: image_record(self._images[place["checksum"]]) for place in places}
        return trajectory_from_record({**header, "sequences": rows, "images": images})
