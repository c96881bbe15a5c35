"""The games as tasks, in the published splits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentrl.task import Task

from ...option_types import typed_options
from .data import Games

ENVIRONMENT = "alfworld"


class AlfworldTasks:
    """The games of a split, in the order of their ids.

    Raises:
        UsageError: the split does not exist, or the data is missing.
    """

    def __init__(self, split: str, *, data: str | None = None, task_types: Iterable[str] | None = None) -> None:
        self.rows = Games(data, task_types).rows(split)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Task:
        row = self.rows[index]
        return Task(id=row.game, environment=ENVIRONMENT, options={"game": row.game}, type=row.task_type)


@typed_options("alfworld")
def alfworld_tasks(
    split: str, *, data: str | None = None, task_types: Iterable[str] | None = None, **_options: Any
) -> AlfworldTasks:
    """Return the task source of a split; the engine and the number of steps are ignored."""
    return AlfworldTasks(split, data=data, task_types=task_types)
