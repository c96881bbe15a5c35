"""Problems of JSONL files, in the forms of GSM8K and MATH."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.errors import UsageError
from agentrl.task import Task

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
        split: The split that the file is.
        path: The file.

    Raises:
        UsageError: the file is missing, or a line is no problem.
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
    """The problems of a JSONL file; lines that are empty are left out.

    Raises:
        UsageError: the file is missing, or a line is no problem.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError("there is no file of problems here", got=path, expected="a JSONL file")
    lines = file.read_text(encoding="utf-8").splitlines()
    problems = [_problem(line, file.stem, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not problems:
        raise UsageError("the file of problems is empty", got=path)
    return problems


def _problem(line: str, kind: str, where: str) -> Problem:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError("a line of a file of problems is no JSON", got=f"{where}: {error}") from error
    question = row.get("question") or row.get("problem") if isinstance(row, Mapping) else None
    answer = _answer(row) if question else None
    if not question or not answer:
        raise UsageError(
            "a line of a file of problems is no problem",
            got=where,
            expected='"question" or "problem", and "answer" (GSM8K: behind ####) or "solution" with \\boxed{}',
        )
    return Problem(question=str(question), answer=answer, kind=str(row.get("type") or row.get("subject") or kind))


def _answer(row: Mapping[str, Any]) -> str:
    """The answer alone: worked solutions state it behind ``####`` or in a box."""
    told = str(row.get("answer") or row.get("solution") or "")
    worked = "####" in told or "\\boxed{" in told
    return (stated_answer(told) or "" if worked else told if "answer" in row else "").strip()
