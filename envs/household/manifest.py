"""The splits as shipped data: which tasks there are, and checksums of what they look like.

The manifest is made by ``python -m agentrl.envs.household.manifest``; a test compares it with what the code makes.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ..manifests import checksum
from .engine import World
from .generator import generate
from .scenes import Size
from .tasks import FIRST_SEED, SPLITS, Row, rows_of

HASHED_TASKS = 512
"""Of a split only so many houses, the first, are hashed."""


def build_manifest() -> dict[str, Any]:
    """Return the manifest as the code makes it: per split its scenes, counts, seeds, and SHA-256 of rows and observations.

    Rows of splits that are hashed whole are written out: task id, scene, task type and seed in a line each.
    """
    return {"size": Size.FULL.value, "splits": {split: _describe(split) for split in SPLITS}}


def _describe(split: str) -> dict[str, Any]:
    rows = rows_of(split)
    hashed = rows[:HASHED_TASKS]
    described: dict[str, Any] = {
        "tasks": len(rows),
        "by_task_type": dict(sorted(Counter(row.task_type.value for row in rows).items())),
        "scenes": sorted({row.scene for row in rows}),
        "first_seed": FIRST_SEED[split],
        "rows_sha256": checksum(map(_line, rows)),
        "hashed_tasks": len(hashed),
        "observations_sha256": checksum(map(first_observation, hashed)),
        "houses_sha256": checksum(map(whole_house, hashed)),
    }
    return described if len(hashed) < len(rows) else {**described, "rows": [_line(row) for row in rows]}


def first_observation(row: Row) -> str:
    """What a task shows first, at full size."""
    house = generate(row.scene, row.task_type, row.seed, Size.FULL)
    return World(house).introduction()


def whole_house(row: Row) -> str:
    """Everything in a task's house, hidden things too, at full size."""
    return json.dumps(generate(row.scene, row.task_type, row.seed, Size.FULL).to_plain(), sort_keys=True)


def _line(row: Row) -> str:
    return f"{row.task_id} {row.scene} {row.task_type} {row.seed}"


if __name__ == "__main__":
    print(json.dumps(build_manifest(), indent=1))
