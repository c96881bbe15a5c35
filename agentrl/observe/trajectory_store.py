"""Every episode on disk, turn by turn, while it runs.

Files are append-only JSON lines, ``trajectories/step-000012.jsonl`` for what happened during training step 12. Three
kinds of records with the trajectory's ``id``:

- ``start``: an attempt begins: task, seed, group, attempt. What was written for the same id before is void.
- ``turn``: a turn is complete: the tokens that each sequence has gained since the last record.
- ``end``: outcome, reward, metrics, the table of turns, and the tokens after the last turn.

An ``image`` record has the image's checksum as ``id`` and stands once in a file, before the tokens that stand for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.image import image_from_record, image_record
from agentrl.message import ImagePart
from agentrl.observe.disk import replace_file, writing
from agentrl.observe.json_lines import JsonLinesWriter, read_json_lines
from agentrl.trajectory import TokenSequence, Trajectory, Turn

_PATTERN = "step-*.jsonl"


class TrajectoryStore:
    """Writes trajectories. A record reaches the operating system before the call returns, and the disk at `rotate`.

    Args:
        folder: The run's ``trajectories``.
        step: The training step that begins.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        self._folder = folder
        self._written: dict[str, list[int]] = {}
        self._images: set[str] = set()
        self._file = JsonLinesWriter(step_file(folder, step))

    def start(self, trajectory: Trajectory) -> None:
        """An attempt begins.

        Raises:
            UsageError: the disk is full.
        """
        self._written[trajectory.id] = []
        self._file.append({"kind": "start", "id": trajectory.id, "trajectory": _header(trajectory.to_record())})

    def turn(self, trajectory: Trajectory, turn: Turn) -> None:
        """A turn is complete.

        Raises:
            UsageError: the disk is full.
        """
        tokens = self._new_tokens(trajectory)
        self._file.append({"kind": "turn", "id": trajectory.id, "turn": turn.index, "sequences": tokens})

    def end(self, trajectory: Trajectory) -> None:
        """An attempt ended.

        Raises:
            UsageError: the disk is full.
        """
        tokens = self._new_tokens(trajectory)
        del self._written[trajectory.id]
        record = trajectory.to_record()
        turns = [sequence["turns"] for sequence in record["sequences"]]
        self._file.append(
            {
                "kind": "end",
                "id": trajectory.id,
                "trajectory": _header(record),
                "sequences": tokens,
                "turns": turns,
            }
        )

    def rotate(self, step: int) -> None:
        """Go on in the file of another training step; the old one is made durable."""
        self.sync()
        self._file.close()
        self._images.clear()
        self._file = JsonLinesWriter(step_file(self._folder, step))

    def sync(self) -> None:
        """Make everything written so far survive a power cut."""
        self._file.sync()

    @property
    def position(self) -> int:
        """Bytes in the current step's file."""
        return self._file.position

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        self._file.close()

    def _new_tokens(self, trajectory: Trajectory) -> list[dict[str, Any]]:
        """The tokens of each sequence that no record holds yet; advances the marks."""
        marks = self._written.setdefault(trajectory.id, [])
        marks.extend([0] * (len(trajectory.sequences) - len(marks)))
        pieces = []
        for number, sequence in enumerate(trajectory.sequences):
            own = len(sequence) - sequence.shared
            if own == marks[number]:
                continue
            self._write_images(sequence.own_images(marks[number]))
            pieces.append(_piece(trajectory, number, sequence, marks[number]))
            marks[number] = own
        return pieces

    def _write_images(self, images: list[ImagePart]) -> None:
        for image in images:
            if image.checksum not in self._images:
                self._images.add(image.checksum)
                self._file.append({"kind": "image", "id": image.checksum, "image": image_record(image)})


def step_file(folder: Path, step: int) -> Path:
    """The file of a training step."""
    return folder / f"step-{step:06d}.jsonl"


def void_after(folder: Path, step: int, position: int) -> None:
    """Set aside what a killed run wrote after its checkpoint, before those episodes are played again.

    It moves into the folder ``void``, where `read_trajectories` does not look.

    Args:
        folder: The run's ``trajectories``.
        step: The step that was running at the checkpoint.
        position: Bytes in that step's file at the checkpoint; later files are void as a whole.
    """
    for file in sorted(folder.glob(_PATTERN)):
        number = _step_of(file)
        keep = position if number == step else 0
        if number < step or file.stat().st_size == keep:
            continue
        with writing(file):
            target = _unused(folder / "void" / file.name)
            target.parent.mkdir(exist_ok=True)
            data = file.read_bytes()
            target.write_bytes(data[keep:])
            replace_file(file, data[:keep])


def _unused(path: Path) -> Path:
    number = 1
    while (found := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return found


def _step_of(file: Path) -> int:
    return int(file.stem.removeprefix("step-"))


def _piece(trajectory: Trajectory, number: int, sequence: TokenSequence, start: int) -> dict[str, Any]:
    piece: dict[str, Any] = {"sequence": number, **sequence.own_arrays(start)}
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
    """The trajectories of a store, in the order in which they ended; then, if asked for, the unfinished ones.

    Args:
        source: The store's folder, or one of its files.
        unfinished: Whether to give episodes without an end, too.
    """
    running: dict[str, _Parts] = {}
    images: dict[str, ImagePart] = {}
    step = 0
    for file in sorted(source.glob(_PATTERN)) if source.is_dir() else [source]:
        step = _step_of(file)
        for record in read_json_lines(file):
            identity = record["id"]
            if record["kind"] == "start":
                running[identity] = _Parts(record["trajectory"], images)
                continue
            if record["kind"] == "image":
                images[identity] = image_from_record(record["image"])
                continue
            parts = running.get(identity)
            if parts is None:
                continue
            parts.add(record["sequences"])
            if record["kind"] == "end":
                del running[identity]
                yield StoredTrajectory(parts.finish(record), step, complete=True)
    if unfinished:
        for parts in running.values():
            yield StoredTrajectory(parts.restore(parts.header, []), step, complete=False)


class _Parts:
    """What the records of one attempt have said so far."""

    def __init__(self, header: Mapping[str, Any], images: Mapping[str, ImagePart]) -> None:
        self.header = header
        self._images = images
        self._sequences: list[dict[str, Any]] = []

    def add(self, pieces: list[dict[str, Any]]) -> None:
        for piece in pieces:
            while piece["sequence"] >= len(self._sequences):
                self._sequences.append(
                    {"parent": None, "shared": 0, "token_ids": [], "sources": [], "logprobs": [], "versions": []}
                )
            row = self._sequences[piece["sequence"]]
            for name in ("token_ids", "sources", "logprobs", "versions"):
                row[name].extend(piece[name])
            row.setdefault("images", []).extend(piece.get("images", ()))
            row.setdefault("routes", []).extend(piece.get("routes", ()))
            row["parent"] = piece.get("parent", row["parent"])
            row["shared"] = piece.get("shared", row["shared"])

    def finish(self, end: Mapping[str, Any]) -> Trajectory:
        return self.restore(end["trajectory"], end["turns"])

    def restore(self, header: Mapping[str, Any], turns: list[list[Any]]) -> Trajectory:
        rows = [{**row, "turns": turns[i] if i < len(turns) else []} for i, row in enumerate(self._sequences)]
        places = (place for row in rows for place in row.get("images", ()))
        images = {place["checksum"]: image_record(self._images[place["checksum"]]) for place in places}
        return Trajectory.from_record({**header, "sequences": rows, "images": images})
