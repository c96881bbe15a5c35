"""The task source of the search environment.

Each split has its own fact world, whose names no other split has. Tests compare checksums of the generated questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.errors import UsageError

from ..task_ids import SPLITS, NumberedTasks
from .options import ENVIRONMENT, SearchOptions
from .questions import Question, by_id, questions_of


class SearchTasks(NumberedTasks):
    """The questions of a split that the options allow.

    Raises:
        UsageError: the split does not exist, or its file cannot be read.
    """

    def __init__(self, split: str, options: SearchOptions) -> None:
        self.questions = questions_of(split, options)
        super().__init__(ENVIRONMENT, split, [int(question.id.rpartition("-")[2]) for question in self.questions])
        self._options = options

    def _task_fields(self, task_id: str) -> Mapping[str, Any]:
        question = question_of(task_id, self._options)
        return {"ground_truth": list(question.golden), "type": question.type}


def split_of(task_id: str) -> str:
    """Return the split of a task id such as ``valid-17``.

    Raises:
        UsageError: the split does not exist.
    """
    split = task_id.rpartition("-")[0]
    if split not in SPLITS:
        raise UsageError(f"no such {ENVIRONMENT} task", got=repr(task_id), expected=f"{SPLITS[0]}-0 and so on")
    return split


def question_of(task_id: str, options: SearchOptions) -> Question:
    """Return the question of a task id.

    Raises:
        UsageError: the task does not exist.
    """
    found = by_id(split_of(task_id), options).get(task_id)
    if found is None:
        raise UsageError("no such search_qa task under these options", got=repr(task_id))
    return found
