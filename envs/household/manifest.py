"""The splits as shipped data: their tasks, and checksums of the houses.

``python -m agentrl.envs.household.manifest`` writes the manifest; a test compares it with the code.
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
"""Maximum number of hashed houses per split; the first ones are hashed."""


def build_manifest() -> dict[str, Any]:
    """Build the manifest: the scenes, counts, seeds, and SHA-256 of rows and observations of each split.

    Rows of splits that are hashed completely are included: one line each, of task id, scene, task type and seed.
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
    """Return the first observation of a task, at full size."""
    house = generate(row.scene, row.task_type, row.seed, Size.FULL)
    return World(house).introduction()


def whole_house(row: Row) -> str:
    """Return the JSON text of a task's house, including hidden things, at full size."""
    return json.dumps(generate(row.scene, row.task_type, row.seed, Size.FULL).to_plain(), sort_keys=True)


def _line(row: Row) -> str:
    return f"{row.task_id} {row.scene} {row.task_type} {row.seed}"


if __name__ == "__main__":
    print(json.dumps(build_manifest(), indent=1))
