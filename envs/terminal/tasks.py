"""The tasks: generated from the split's name and a number, or read from folders."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from random import Random
from typing import Any

from agentrl.errors import UsageError

from ..splits import split_of_text
from ..task_ids import TEST, TRAIN, VALID, NumberedTasks, check_split, parse_task_id
from .folders import read_folder
from .kinds import KINDS, Errand
from .task_folder import FolderTask

ENVIRONMENT = "terminal"
SIZES = {TRAIN: 800, VALID: 80, TEST: 80}
"""Number of generated tasks by split; their kinds alternate."""


class TerminalTasks(NumberedTasks):
    """The tasks of a split.

    Args:
        split: Name of the split.
        folders: Split to folder of task folders; tasks are generated if left out.

    Raises:
        UsageError: the split does not exist, or its folder is not valid.
    """

    def __init__(self, split: str, folders: Mapping[str, str] | None) -> None:
        check_split(split, ENVIRONMENT)
        self._is_generated = not folders
        size = len(read_folder(folder_of(split, folders))) if folders else SIZES[split]
        super().__init__(ENVIRONMENT, split, range(size))

    def _task_fields(self, task_id: str) -> Mapping[str, Any]:
        return {"type": errand_of(task_id).kind} if self._is_generated else {}


def folder_of(split: str, folders: Mapping[str, str]) -> str:
    """Return the folder of a split.

    Raises:
        UsageError: the split has no folder.
    """
    if split not in folders:
        raise UsageError(f"terminal has no folder for split {split}", got=", ".join(folders), expected=split)
    return folders[split]


@functools.lru_cache(maxsize=2048)
def errand_of(task_id: str) -> Errand:
    """Return the generated task of an id; the checksum of its instruction belongs to its split.

    Raises:
        UsageError: the task does not exist.
    """
    split, number = parse_task_id(task_id, ENVIRONMENT, SIZES.__getitem__)
    make, random = KINDS[number % len(KINDS)], Random(f"terminal {task_id}")
    return next(errand for _ in itertools.count() if split_of_text((errand := make(random)).instruction) == split)


def folder_task_of(task_id: str, folders: Mapping[str, str]) -> FolderTask:
    """Return the task folder of an id.

    Raises:
        UsageError: the task does not exist.
    """
    split, number = parse_task_id(task_id, ENVIRONMENT, lambda split: len(read_folder(folder_of(split, folders))))
    return read_folder(folder_of(split, folders))[number]
