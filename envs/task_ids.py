"""Tasks that are numbered within their splits, with ids of the form ``split-number``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from agentrl.errors import UsageError
from agentrl.task import Task

TRAIN, VALID, TEST = SPLITS = ("train", "valid", "test")
FIRST_SEED = {TRAIN: 0, VALID: 1_000_000, TEST: 2_000_000}
"""Seed of task number 0 of each split; the next tasks have the next seeds."""


class TaskNumber(NamedTuple):
    """Split and number of a task id."""

    split: str
    number: int


def parse_task_id(
    task_id: object, environment: str, size_of: Callable[[str], int], splits: Sequence[str] = SPLITS
) -> TaskNumber:
    """Return the split and the number of a task id such as ``valid-17``.

    Args:
        task_id: The id.
        environment: Name of the environment, for the message.
        size_of: Function that returns the number of tasks of a split.
        splits: Splits of the environment.

    Raises:
        UsageError: the task does not exist.
    """
    split, _, number = str(task_id).rpartition("-")
    size = size_of(split) if split in splits else 0
    if not number.isdecimal() or int(number) >= size:
        expected = f"{split}-0 to {split}-{size - 1}" if size else " or ".join(f"{name}-0" for name in splits)
        raise UsageError(f"no such {environment} task", got=repr(task_id), expected=expected)
    return TaskNumber(split, int(number))


def asked_task(options: Mapping[str, Any] | None, environment: str) -> str | None:
    """Return the task id in the options of a reset; ``None`` if they have none.

    Raises:
        UsageError: there are other options.
    """
    given = dict(options or {})
    task_id = given.pop("task_id", None)
    if given:
        raise UsageError(f"{environment} cannot reset with these options", got=", ".join(given), expected="task_id")
    return None if task_id is None else str(task_id)


def check_split(split: str, environment: str) -> str:
    """Return `split` if it is one of `SPLITS`.

    Raises:
        UsageError: it is not.
    """
    if split not in SPLITS:
        expected = " or ".join(SPLITS)
        raise UsageError(f"environment {environment} has no split of this name", got=split, expected=expected)
    return split


class NumberedTasks(ABC):
    """Tasks of a split that have certain numbers.

    Args:
        environment: Name of the environment.
        split: One of `SPLITS`.
        numbers: Numbers of the tasks, in their order.
    """

    def __init__(self, environment: str, split: str, numbers: Sequence[int]) -> None:
        self.environment = environment
        self.split = split
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Task:
        task_id = self._id(index)
        return Task(
            id=task_id,
            environment=self.environment,
            seed=FIRST_SEED[self.split] + self._numbers[index],
            options={"task_id": task_id},
            **self._task_fields(task_id),
        )

    def draw(self, seed: int) -> str:
        """Draw the id of a task, uniformly."""
        return self._id(int(Random(f"task {seed}").random() * len(self)))

    def _id(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return f"{self.split}-{self._numbers[index]}"

    @abstractmethod
    def _task_fields(self, task_id: str) -> Mapping[str, Any]:
        """Return other fields of a task: its type, its ground truth."""
