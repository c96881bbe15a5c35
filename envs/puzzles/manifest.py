"""The splits of all puzzles and generated problems as shipped data: seeds, and checksums of the first instances.

``python -m agentrl.envs.puzzles.manifest`` writes the manifest; a test compares it with the code.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.registry import Kind, load
from agentrl.task import SeedTasks

from .. import PLUGINS

PACKAGES = (f"{__package__}.", "agentrl.envs.math_problems.")
HASHED_TASKS = 16
"""Number of hashed instances per split; the first ones are hashed."""


def puzzle_names() -> list[str]:
    """Return the names of the shipped puzzles, in alphabetical order."""
    table = PLUGINS[Kind.ENVIRONMENT]
    return sorted(name for name, reference in table.items() if reference.startswith(PACKAGES))


def puzzle_spec_of(name: str) -> EnvironmentSpec:
    """Return the spec of a shipped puzzle."""
    spec: EnvironmentSpec = load(PLUGINS[Kind.ENVIRONMENT][name])
    return spec


def build_manifest() -> dict[str, Any]:
    """Build the manifest: the tasks of each split, and the SHA-256 of its first instances with their hidden parts."""
    splits = {}
    for number, split in enumerate(SeedTasks.SPLITS):
        first = number * SeedTasks.SPLIT_SIZE
        splits[split] = {"task_ids": f"{split}-<n>", "seeds": f"{first} + n"}
    return {"splits": splits, "hashed_tasks": HASHED_TASKS, "instances_sha256": _checksums()}


def _checksums() -> dict[str, dict[str, str]]:
    return {name: {split: _checksum(name, split) for split in SeedTasks.SPLITS} for name in puzzle_names()}


def _checksum(name: str, split: str) -> str:
    spec, digest = puzzle_spec_of(name), hashlib.sha256()
    env: Any = spec.make()
    tasks = spec.tasks(split)
    for index in range(HASHED_TASKS):
        observation, _ = env.reset(seed=tasks[index].seed)
        instance = {"game": env.game.state(), "over": False, "steps": 0}
        digest.update(f"{observation}\n{json.dumps(instance, sort_keys=True)}\n".encode())
    return digest.hexdigest()


if __name__ == "__main__":
    print(json.dumps(build_manifest(), indent=1))
