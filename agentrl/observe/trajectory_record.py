"""A trajectory as plain JSON types, as run folders, checkpoints and dumps of updates store it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any, TypeAlias

from agentrl.errors import Outcome
from agentrl.message import transcript_from_record, transcript_record
from agentrl.message.image import image_from_record, image_record
from agentrl.trajectory import BranchPoint, StoredSequence, TokenSequence, Trajectory, Turn, TurnTimings

_PLAIN_FIELDS = tuple(
    one.name
    for one in fields(Trajectory)
    if one.name
    not in {"sequences", "outcome", "branches_from", "transcript", "conversations", "answers", "completions"}
    and one.name not in ("reward_sources", "environment_sources", "proposals", "log", "contexts")
)
_TURN_FIELDS = tuple(one.name for one in fields(Turn) if one.name != "timings")
_TIMING_FIELDS = tuple(one.name for one in fields(TurnTimings))
_LEFT_OUT = {
    "own_reward": 0.0,
    "repaired_calls": 0,
    "adapter": None,
    "counted_tokens": None,
    "scoring": 0.0,
    "started": None,
}
"""Fields of a turn and of its timings that are not written if they have these values."""


def trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as plain JSON types; `trajectory_from_record` restores it exactly. Images are stored once."""
    index = {id(sequence): i for i, sequence in enumerate(trajectory.sequences)}
    images = {image.checksum: image_record(image) for s in trajectory.sequences for image in s.own_images()}
    return {
        **{name: getattr(trajectory, name) for name in _PLAIN_FIELDS},
        **({"images": images} if images else {}),
        **({"reward_sources": trajectory.reward_sources} if trajectory.reward_sources else {}),
        **({"environment_sources": trajectory.environment_sources} if trajectory.environment_sources else {}),
        **({"branches_from": asdict(trajectory.branches_from)} if trajectory.branches_from else {}),
        **({"proposals": trajectory.proposals} if trajectory.proposals else {}),
        **({"log": trajectory.log} if trajectory.log else {}),
        **({"transcript": transcript_record(trajectory.transcript)} if trajectory.transcript else {}),
        "outcome": None if trajectory.outcome is None else trajectory.outcome.value,
        "sequences": [
            {
                "parent": None if s.parent is None else index[id(s.parent)],
                "shared": s.shared,
                "turns": [_turn_record(turn) for turn in s.turns],
                **s.own_arrays(),
            }
            for s in trajectory.sequences
        ],
    }


ReadRecord: TypeAlias = Callable[[], Mapping[str, Any]]
"""Reader of a whole `trajectory_record`."""


def record_outline(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of a trajectory without its tokens and images, for the argument `read` of the next function."""
    rows = [{name: row[name] for name in ("parent", "shared", "turns")} for row in record["sequences"]]
    return {**{name: value for name, value in record.items() if name != "images"}, "sequences": rows}


def trajectory_from_record(record: Mapping[str, Any], *, read: ReadRecord | None = None) -> Trajectory:
    """Restore a trajectory from `trajectory_record`.

    With `read`, which reads the whole record when tokens are first used, `record` is only its outline.
    """
    sequences: list[TokenSequence] = []
    images = {checksum: image_from_record(row) for checksum, row in record.get("images", {}).items()}
    for number, row in enumerate(record["sequences"]):
        parent = None if row["parent"] is None else sequences[row["parent"]]
        if read is None:
            sequence = TokenSequence(parent=parent, shared=row["shared"])
            sequence.load_arrays(row, images)
        else:
            sequence = StoredSequence(parent, row["shared"], partial(_load_tokens, read, number))
        sequence.turns.extend(_turns(row["turns"]))
        sequences.append(sequence)
    outcome = None if record["outcome"] is None else Outcome(record["outcome"])
    plain = {name: record[name] for name in _PLAIN_FIELDS}
    text = transcript_from_record(record.get("transcript", ()))
    origin = BranchPoint(**record["branches_from"]) if "branches_from" in record else None
    return Trajectory(
        **plain,
        outcome=outcome,
        sequences=sequences,
        branches_from=origin,
        reward_sources=record.get("reward_sources", {}),
        environment_sources=record.get("environment_sources", {}),
        proposals=record.get("proposals", []),
        log=record.get("log", ""),
        transcript=text,
    )


def _load_tokens(read: ReadRecord, number: int, sequence: TokenSequence) -> None:
    record = read()
    images = {checksum: image_from_record(row) for checksum, row in record.get("images", {}).items()}
    sequence.load_arrays(record["sequences"][number], images)


def _turn_record(turn: Turn) -> dict[str, Any]:
    return {**_without_defaults(turn, _TURN_FIELDS), "timings": _without_defaults(turn.timings, _TIMING_FIELDS)}


def _without_defaults(one: Turn | TurnTimings, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(one, name) for name in names}
    return {name: value for name, value in values.items() if name not in _LEFT_OUT or value != _LEFT_OUT[name]}


def _turns(rows: Iterable[Mapping[str, Any]]) -> Iterator[Turn]:
    for row in rows:
        values = {name: row[name] for name in _TURN_FIELDS if name in row}
        seconds = {name: row["timings"][name] for name in _TIMING_FIELDS if name in row["timings"]}
        yield Turn(**values, timings=TurnTimings(**seconds))


def environment_label(group_id: str, task_id: str) -> str:
    """Return the label of a group's environment in its run, with the stage; empty for the only environment.

    The group may be that of a role in the group.

    >>> environment_label("7-easy~1-train-3", "train-3"), environment_label("7-train-3", "train-3")
    ('easy~1', '')
    >>> environment_label("7-easy-3:solver", "3"), environment_label("7-easy-3/0.0:solver", "3")
    ('easy', 'easy')
    """
    position, _, rest = group_id.partition("-")
    if not position.isdecimal():
        return ""
    if rest.endswith(task_id):
        return rest.removesuffix(task_id).removesuffix("-")
    label, found, _ = rest.partition(f"-{task_id}")
    return label if found else ""
