"""The task source of the search environment.

Generated questions are made by rule: each split has a fact world of its own, whose names no other split has. Tests
compare checksums of what the rule makes.
"""

from __future__ import annotations

from agentrl.errors import UsageError
from agentrl.task import Task

from .options import SearchOptions
from .questions import FIRST_SEED, Question, by_id, questions_of
from .vocabulary import SPLITS

ENVIRONMENT = "search_qa"


class SearchTasks:
    """The questions of a split that the options allow.

    Raises:
        UsageError: no such split, or an unreadable file.
    """

    def __init__(self, split: str, options: SearchOptions) -> None:
        self.split = split
        self.questions = questions_of(split, options)

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, index: int) -> Task:
        question = self.questions[index]
        number = int(question.id.rpartition("-")[2])
        return Task(
            id=question.id,
            environment=ENVIRONMENT,
            seed=FIRST_SEED[self.split] + number,
            options={"task_id": question.id},
            ground_truth=list(question.golden),
            type=question.type,
        )


def split_of(task_id: str) -> str:
    """The split that a task id such as ``valid-17`` belongs to.

    Raises:
        UsageError: there is no such split.
    """
    split = task_id.rpartition("-")[0]
    if split not in SPLITS:
        raise UsageError("no such search_qa task", got=repr(task_id), expected=f"{SPLITS[0]}-0 and so on")
    return split


def question_of(task_id: str, options: SearchOptions) -> Question:
    """The question of a task id.

    Raises:
        UsageError: there is no such task.
    """
    found = by_id(split_of(task_id), options).get(task_id)
    if found is None:
        raise UsageError("no such search_qa task under these options", got=repr(task_id))
    return found
