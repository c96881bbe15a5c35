"""The splits of published tasks. Task ids have the position of a task in its file, such as ``test-17``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import UsageError

from ...task_ids import TEST, TRAIN, NumberedTasks, check_split, parse_task_id
from ..options import ENVIRONMENT, TelecomOptions
from .reading import PublishedFolder, PublishedTask, read_folder


class PublishedTasks(NumberedTasks):
    """The published tasks of a split.

    Args:
        split: ``train`` or ``test``.
        options: Options with `data`.

    Raises:
        UsageError: the split or the set of tasks does not exist, or the files cannot be read.
    """

    def __init__(self, split: str, options: TelecomOptions) -> None:
        check_split(split, ENVIRONMENT)
        self._folder = folder_of(options)
        super().__init__(ENVIRONMENT, split, _numbers(self._folder, split, options.task_set))

    def _task_fields(self, task_id: str) -> Mapping[str, Any]:
        number = int(task_id.rpartition("-")[2])
        return {"type": self._folder.tasks[number].kind}


def folder_of(options: TelecomOptions) -> PublishedFolder:
    """Return the folder of options with `data`."""
    return read_folder(str(options.data))


def splits_with_tasks(options: TelecomOptions) -> tuple[str, ...]:
    """Return the splits that the files have; an environment draws from the first one by default."""
    has_both = options.task_set is None and {TRAIN, TEST} <= folder_of(options).sets.keys()
    return (TRAIN, TEST) if has_both else (TEST,)


def published_task(task_id: str, options: TelecomOptions) -> PublishedTask:
    """Return a task by its id.

    Raises:
        UsageError: the split does not have the task.
    """
    folder = folder_of(options)
    found = parse_task_id(task_id, ENVIRONMENT, lambda split: len(folder.tasks))
    if found.number not in _numbers(folder, found.split, options.task_set):
        raise UsageError(f"no such telecom task in the split {found.split}", got=repr(task_id))
    return folder.tasks[found.number]


def _numbers(folder: PublishedFolder, split: str, task_set: str | None) -> Sequence[int]:
    """Return the numbers of a split's tasks."""
    if task_set is not None:
        name = task_set if split == TEST else None
        if task_set not in folder.sets:
            raise UsageError(
                "unknown set of published telecom tasks",
                got=repr(task_set),
                expected=" or ".join(folder.sets) or "tasks.json with split_tasks.json",
            )
    elif TEST in folder.sets:
        name = split if split in folder.sets else None
    elif split == TEST:
        return range(len(folder.tasks))
    else:
        name = None
    if name is None:
        raise UsageError(
            "the published telecom tasks do not have this split",
            got=split,
            expected=TEST if task_set is not None or TRAIN not in folder.sets else f"{TRAIN} or {TEST}",
            hint=None if task_set is None else "leave out task_set for the splits train and test",
        )
    return folder.sets[name]
