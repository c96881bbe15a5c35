"""Problems of data files in the formats of GSM8K, MATH and verl."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from agentrl.errors import UsageError
from agentrl.message.data_file import Row, read_rows
from agentrl.task import Task

from .. import verl_rows
from .answers import stated_answer


class Problem(NamedTuple):
    """A problem."""

    question: str
    answer: str
    kind: str


class FileTasks:
    """The tasks of a file, one per line.

    Args:
        environment: Name of the environment.
        split: The split of the file.
        path: The file.

    Raises:
        UsageError: the file is missing, or a line is not a problem.
    """

    def __init__(self, environment: str, split: str, path: str) -> None:
        self.environment, self.split = environment, split
        self.problems = read_problems(path)

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> Task:
        problem = self.problems[index]
        return Task(
            id=f"{self.split}-{index}",
            environment=self.environment,
            seed=index,
            options=problem._asdict(),
            ground_truth=problem.answer,
            type=problem.kind,
        )


def read_problems(path: str) -> list[Problem]:
    """Read the problems of a file.

    Raises:
        UsageError: the file cannot be read, or a row is not a problem.
    """
    kind = Path(path).stem
    problems = [_problem(row, kind) for row in read_rows(path, "file of problems")]
    if not problems:
        raise UsageError("the file of problems is empty", got=path)
    return problems


def _problem(row: Row, kind: str) -> Problem:
    question = row.first("question", "problem")
    question, answer = verl_rows.question(row) if question is None else question, _answer(row)
    if not question or not answer:
        got = f"the columns {', '.join(row.columns)}" if not question else f"no answer to {str(question)[:60]!r}"
        _refuse(row, got)
    if not isinstance(question, str | int | float):
        _refuse(row, f"question: {question!r:.80}, not text")
    return Problem(question=str(question), answer=answer, kind=verl_rows.row_type(row, "type", "subject") or kind)


def _refuse(row: Row, got: str) -> NoReturn:
    raise UsageError(
        f"{row.location} is not a problem",
        got=got,
        expected='"question" or "problem", and "answer" (GSM8K: after ####) or "solution" with \\boxed{}; or a row '
        "for verl, with a prompt and a ground_truth in reward_model",
    )


def _answer(row: Row) -> str:
    """Return only the answer: solutions state it after ``####`` or in a box. 0 is an answer, too."""
    given = row.values.get("answer")
    if given is None and row.first("solution") is None:
        given = verl_rows.ground_truth(row)
    is_alone = given is not None and given != ""
    text = _only(row, given if is_alone else row.first("solution") or "")
    if "####" in text or "\\boxed{" in text:
        return (stated_answer(text) or "").strip()
    return text.strip() if is_alone else ""


def _only(row: Row, given: Any) -> str:
    """Return the text of an answer, of which a list may have only one."""
    try:
        found = dict.fromkeys(verl_rows.answers_in(given))
    except ValueError as error:
        _refuse(row, f"answer: {error}")
    if len(found) > 1:
        _refuse(row, f"{len(found)} different answers, {given!r:.80}")
    return next(iter(found), "")
