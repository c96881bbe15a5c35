"""Damage to the files of a stopped run, and the records that it destroys."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.files import decode_record
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.trajectory_store import step_files
from agentrl.testing.chaos.plan import PlannedFault, Target

MAX_CUT_BYTES = 4000
"""Maximum number of bytes truncated from a file of records."""


@dataclass(slots=True)
class Damage:
    """Records that a fault destroyed, which the check therefore does not require."""

    ids: set[str] = field(default_factory=set)
    """Ids of trajectories and groups."""
    steps: set[int] = field(default_factory=set)
    """Steps whose metrics were destroyed."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Destroyed group records, each with its ``step``."""
    seeds: set[int] = field(default_factory=set)
    """Seeds of trajectories."""

    def add_line(self, line: bytes, step: int) -> None:
        """Record a line of the trajectory store or of the metrics before it is destroyed."""
        try:
            record = decode_record(line)
        except ValueError:
            return
        if isinstance(record.get("step"), int):
            self.steps.add(record["step"])
        if isinstance(record.get("id"), str):
            self.ids.add(record["id"])
        if record.get("kind") == "group":
            self.groups.append({**record, "step": step})
        if "trajectory" in record:
            self.seeds.add(record["trajectory"]["seed"])


def damage_files(fault: PlannedFault, run: RunDirectory, damage: Damage) -> str:
    """Damage a file of the run and record what was destroyed; return a description, empty if no file was damaged.

    Only the newest checkpoint is damaged, and only if there is an older one.
    """
    rng = random.Random(fault.draw)
    if fault.target is Target.CHECKPOINT:
        return _damage_checkpoint(fault.way, run, rng)
    files = step_files(run.trajectories) if fault.target is Target.STORE else [run.metrics_file]
    files = [file for file in files if file.is_file() and file.stat().st_size]
    if not files:
        return ""
    if fault.way == "a changed byte":
        return _change_line(rng.choice(files), rng, damage)
    return _cut_end(files[-1], rng, damage)


def _step(file: Path) -> int:
    return int(file.stem.partition("-")[2] or 0)


def _change_line(file: Path, rng: random.Random, damage: Damage) -> str:
    data = bytearray(file.read_bytes())
    at = rng.choice([place for place in _sample(rng, len(data)) if data[place] != ord("\n")])
    start, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
    damage.add_line(bytes(data[start : end if end >= 0 else len(data)]), _step(file))
    data[at] = ord("~") if data[at] != ord("~") else ord("!")
    file.write_bytes(data)
    return f"byte {at} of {file.name}"


def _sample(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(size) for _ in range(64)]


def _cut_end(file: Path, rng: random.Random, damage: Damage) -> str:
    data = file.read_bytes()
    keep = max(0, len(data) - rng.randrange(1, MAX_CUT_BYTES))
    for line in data[data.rfind(b"\n", 0, keep) + 1 :].splitlines():
        damage.add_line(line, _step(file))
    file.write_bytes(data[:keep])
    return f"the last {len(data) - keep} bytes of {file.name}"


def _damage_checkpoint(way: str, run: RunDirectory, rng: random.Random) -> str:
    present = Checkpoints(run.checkpoints, keep=1).present()
    if len(present) < 2:
        return ""
    file = rng.choice(sorted(path for path in present[-1].path.rglob("*") if path.is_file()))
    data = bytearray(file.read_bytes())
    if way == "a missing file" or not data:
        file.unlink()
    elif way == "a missing end":
        file.write_bytes(data[: rng.randrange(len(data))])
    else:
        at = rng.randrange(len(data))
        data[at] ^= 1
        file.write_bytes(data)
    return f"{present[-1].path.name}/{file.name}"
