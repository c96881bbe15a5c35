"""Tasks from a file: JSON lines or Parquet, one task per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError
from agentrl.task import Task, read_rows

_FIELDS = tuple(field.name for field in fields(Task))
_CHECKED: Mapping[str, tuple[type, str]] = {
    "seed": (int, "a whole number"),
    "options": (Mapping, "an object"),
    "columns": (Mapping, "an object"),
    "prompt": (str, "text"),
    "type": (str, "text"),
    "max_turns": (int, "a whole number"),
}


def read_tasks(path: str | Path, *, environment: str) -> Sequence[Task]:
    """All tasks of a file, in its order.

    Args:
        path: ``.jsonl`` or ``.parquet``; columns are the fields of `Task`, ``id`` is the row's number when left out.
        environment: Name for rows that do not say.

    Raises:
        UsageError: the file cannot be read, a row has unknown columns, or two rows have one id.
    """
    file = Path(path)
    tasks = [
        _task(row, f"{path} row {number}", number, environment) for number, row in enumerate(read_rows(file), start=1)
    ]
    if not tasks:
        raise UsageError(f"task file {path} is empty", expected="at least one row")
    if len({task.id for task in tasks}) < len(tasks):
        raise UsageError(f"task file {path} has two rows of one id", expected="unique ids")
    return tasks


def _task(row: Mapping[str, Any], place: str, number: int, environment: str) -> Task:
    unknown = sorted(set(row) - set(_FIELDS))
    if unknown:
        raise UsageError(f"{place} has unknown columns", got=", ".join(unknown), expected=", ".join(_FIELDS))
    given = {name: value for name, value in row.items() if value is not None}
    for name, (kind, expected) in _CHECKED.items():
        if name in given and (not isinstance(given[name], kind) or isinstance(given[name], bool)):
            raise UsageError(f"{name} of {place} is of a wrong type", got=repr(given[name]), expected=expected)
    if given.get("max_turns", 1) < 1:
        raise UsageError(f"max_turns of {place} is too small", got=given["max_turns"], expected="at least 1")
    return Task(**{"environment": environment, **given, "id": str(given.get("id", number))})
