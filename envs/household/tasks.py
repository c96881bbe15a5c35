"""The tasks and their splits: the scene, kind of task and seed of each task id.

The validation splits have ALFWorld's numbers of tasks per type, the training split ten times ALFWorld's, and the test
split ten times those of the unseen validation split, so that it stays large if options restrict it. Only the unseen
splits use the held-out scenes; the seeds of the splits are in disjoint ranges.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from agentrl.errors import UsageError
from agentrl.task import Task

from ..task_ids import parse_task_id
from .goals import TaskType
from .options import HouseholdOptions
from .scenes import HELD_OUT, SCENES_PER_ROOM, room_of, scenes

ENVIRONMENT = "household"
TRAIN, VALID_SEEN, VALID_UNSEEN, TEST_UNSEEN = SPLITS = ("train", "valid_seen", "valid_unseen", "test_unseen")
UNSEEN = (VALID_UNSEEN, TEST_UNSEEN)
"""The splits in held-out scenes."""
COUNTS: dict[str, dict[TaskType, int]] = {
    TRAIN: {
        TaskType.PLACE: 7900,
        TaskType.LOOK: 3080,
        TaskType.CLEAN: 6500,
        TaskType.HEAT: 4590,
        TaskType.COOL: 5330,
        TaskType.TWO: 8130,
    },
    VALID_SEEN: {
        TaskType.PLACE: 35,
        TaskType.LOOK: 13,
        TaskType.CLEAN: 27,
        TaskType.HEAT: 16,
        TaskType.COOL: 25,
        TaskType.TWO: 24,
    },
    VALID_UNSEEN: {
        TaskType.PLACE: 24,
        TaskType.LOOK: 18,
        TaskType.CLEAN: 31,
        TaskType.HEAT: 23,
        TaskType.COOL: 21,
        TaskType.TWO: 17,
    },
    TEST_UNSEEN: {
        TaskType.PLACE: 240,
        TaskType.LOOK: 180,
        TaskType.CLEAN: 310,
        TaskType.HEAT: 230,
        TaskType.COOL: 210,
        TaskType.TWO: 170,
    },
}
"""Number of tasks of each split by type."""
FIRST_SEED = {TRAIN: 0, VALID_SEEN: 1_000_000, VALID_UNSEEN: 2_000_000, TEST_UNSEEN: 3_000_000}
"""Seed of a split's first task; the next tasks have the next seeds."""


class Row(NamedTuple):
    """Scene, kind and seed of a task."""

    task_id: str
    scene: int
    task_type: TaskType
    seed: int


class HouseholdTasks:
    """The tasks of a split that the options allow.

    Raises:
        UsageError: the split does not exist, or contains no such task.
    """

    def __init__(self, split: str, options: HouseholdOptions) -> None:
        self.rows = allowed_rows(split, options)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Task:
        row = self.rows[index]
        return Task(
            id=row.task_id,
            environment=ENVIRONMENT,
            seed=row.seed,
            options={"task_id": row.task_id},
            type=row.task_type.value,
        )


def row_of(task_id: str) -> Row:
    """Return the row of a task id such as ``valid_unseen-17``.

    Raises:
        UsageError: the task does not exist.
    """
    split, number = parse_task_id(task_id, ENVIRONMENT, lambda split: sum(COUNTS[split].values()), SPLITS)
    return rows_of(split)[number]


@functools.cache
def allowed_rows(split: str, options: HouseholdOptions) -> tuple[Row, ...]:
    """Return the rows of a split whose task type and room the options allow."""
    rows = tuple(
        row for row in rows_of(split) if row.task_type in options.task_types and room_of(row.scene) in options.rooms
    )
    if not rows:
        raise UsageError(f"household/{split} contains no task of these types in these rooms", got=options)
    return rows


@functools.cache
def rows_of(split: str) -> tuple[Row, ...]:
    """Return all rows of a split. Types are spread evenly: any range of rows has about the split's proportions.

    Raises:
        UsageError: the split does not exist.
    """
    if split not in SPLITS:
        raise UsageError("environment household has no split of this name", got=split, expected=" or ".join(SPLITS))
    spread = sorted(
        ((number + 0.5) / count, task_type, number)
        for task_type, count in COUNTS[split].items()
        for number in range(count)
    )
    pools = {task_type: scenes_of(split, task_type) for task_type in TaskType}
    return tuple(
        Row(f"{split}-{i}", pools[task_type][number % len(pools[task_type])], task_type, FIRST_SEED[split] + i)
        for i, (_, task_type, number) in enumerate(spread)
    )


@functools.cache
def scenes_of(split: str, task_type: TaskType) -> tuple[int, ...]:
    """Return the scenes in which a split has tasks of a type; the kinds of rooms alternate."""
    is_held_out = split in UNSEEN
    return tuple(
        scenes(room)[i]
        for i in range(SCENES_PER_ROOM)
        for room in task_type.rooms
        if (scenes(room)[i] in HELD_OUT[room]) == is_held_out
    )
