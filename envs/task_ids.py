"""Task ids of the form ``split-number``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from agentrl.errors import UsageError


class TaskNumber(NamedTuple):
    """What a task id says."""

    split: str
    number: int


def parse_task_id(task_id: object, sizes: Mapping[str, int], environment: str) -> TaskNumber:
    """Split and number of a task id such as ``valid-17``.

    Args:
        task_id: The id.
        sizes: How many tasks each split has.
        environment: For the message.

    Raises:
        UsageError: there is no such task.
    """
    split, _, number = str(task_id).rpartition("-")
    if split not in sizes or not number.isdecimal() or int(number) >= sizes[split]:
        every = ", ".join(f"{name}-0 to {name}-{size - 1}" for name, size in sizes.items())
        raise UsageError(f"no such {environment} task", got=repr(task_id), expected=every)
    return TaskNumber(split, int(number))
