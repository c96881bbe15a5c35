"""The splits of all puzzles and generated problems as shipped data: seeds, and checksums of the first instances.

The manifest is made by ``python -m agentrl.envs.puzzles.manifest``; a test compares it with what the code makes.
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
"""Of each split so many instances, the first, are hashed."""


def puzzle_names() -> list[str]:
    """Return the shipped environments that are puzzles, in the order of the alphabet."""
    table = PLUGINS[Kind.ENVIRONMENT]
    return sorted(name for name, reference in table.items() if reference.startswith(PACKAGES))


def puzzle_spec_of(name: str) -> EnvironmentSpec:
    """Return the entry of a shipped puzzle."""
    spec: EnvironmentSpec = load(PLUGINS[Kind.ENVIRONMENT][name])
    return spec


def build_manifest() -> dict[str, Any]:
    """Return the manifest as the code makes it: per split the tasks and SHA-256 of the first instances, hidden parts too."""
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
