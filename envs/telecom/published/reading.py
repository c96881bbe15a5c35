"""Reading of a folder with tau2-bench's telecom files: records, tasks and policies."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from agentrl.errors import UsageError

from .schema import CompanyFile, CustomerFile, GoldAction, TaskRow, to_plain
from .world import PublishedWorld, StartFiles

M = TypeVar("M", bound=BaseModel)
COMPANY_FILE, CUSTOMER_FILE = "db.toml", "user_db.toml"
TASK_FILES = ("tasks.json", "tasks_small.json")
HINT = "copy the folder data/tau2/domains/telecom of tau2-bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTask:
    """A published task."""

    number: int
    """Position in the file."""
    row: TaskRow
    start: StartFiles

    @property
    def kind(self) -> str:
        """Kind of the problem: the first part of the id, in brackets, such as ``mms_issue``."""
        head, bracket, _ = self.row.id.removeprefix("[").partition("]")
        return head if bracket and self.row.id.startswith("[") else "published"

    @property
    def gold(self) -> Sequence[GoldAction]:
        """The published solution."""
        return (self.row.evaluation_criteria.actions if self.row.evaluation_criteria else None) or ()

    def begin(self) -> PublishedWorld:
        """Return the state in which the task starts.

        Raises:
            UsageError: a function of the start is unknown, or cannot be carried out.
        """
        world = PublishedWorld.from_files(self.start)
        state = self.row.initial_state
        for step in (state.initialization_actions if state else None) or ():
            world.run(step)
        world.sync()
        return world


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFolder:
    """The tasks of a folder, and sets of them."""

    root: Path
    tasks: Sequence[PublishedTask]
    sets: Mapping[str, Sequence[int]]
    """Numbers of the tasks of each set of the split file, by name; empty without such a file."""


@functools.lru_cache(maxsize=4)
def read_folder(folder: str) -> PublishedFolder:
    """Read the records and tasks of a folder.

    Raises:
        UsageError: a file is missing, or does not have the published shape.
    """
    root = Path(folder).expanduser()
    company = _record(CompanyFile, root / COMPANY_FILE)
    start = StartFiles(company=to_plain(company), customer=to_plain(_record(CustomerFile, root / CUSTOMER_FILE)))
    file = next((root / name for name in TASK_FILES if (root / name).is_file()), None)
    if file is None:
        raise UsageError(f"the folder {folder} has no telecom tasks", expected=" or ".join(TASK_FILES), hint=HINT)
    tasks = [PublishedTask(number=number, row=row, start=start) for number, row in enumerate(_read_tasks(file))]
    splits = root / f"split_{file.stem}.json"
    return PublishedFolder(root=root, tasks=tasks, sets=_read_sets(splits, tasks) if splits.is_file() else {})


def read_text(root: Path, name: str) -> str:
    """Read a policy.

    Raises:
        UsageError: it is missing.
    """
    try:
        return (root / name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"the policy {root / name} cannot be read", got=error, hint=HINT) from error


def _record(kind: type[M], file: Path) -> M:
    try:
        return kind.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:  # also errors of TOML and of the records' shape
        got = _first(error) if isinstance(error, ValidationError) else error
        raise UsageError(
            f"{file} cannot be read", got=got, expected="tau2-bench's telecom records", hint=HINT
        ) from error


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read", got=error, expected="JSON", hint=HINT) from error


def _read_tasks(file: Path) -> list[TaskRow]:
    rows = _json(file)
    rows = rows.get("tasks") if isinstance(rows, dict) else rows
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{file} has no tasks", expected="a list of tasks", hint=HINT)
    return [_read_task(file, number, row) for number, row in enumerate(rows)]


def _read_task(file: Path, number: int, plain: object) -> TaskRow:
    try:
        row = TaskRow.model_validate(plain)
    except ValidationError as error:
        raise UsageError(f"task {number} of {file} cannot be read", got=_first(error), hint=HINT) from error
    state, criteria = row.initial_state, row.evaluation_criteria
    problem = ""
    if state is not None and state.initialization_data:
        problem = "initialization_data: tau2-bench itself cannot start such a telecom task"
    elif state is not None and state.message_history:
        problem = "message_history: the task starts within a conversation"
    elif criteria is not None and "NL_ASSERTION" in criteria.reward_basis:
        problem = "reward_basis NL_ASSERTION, which needs a judge"
    if problem:
        raise UsageError(
            f"task {number} of {file} cannot be played",
            got=problem,
            expected="a start of function calls, and a reward without a judge",
            hint="remove the task from your copy",
        )
    return row


def _read_sets(file: Path, tasks: Sequence[PublishedTask]) -> dict[str, list[int]]:
    """Read sets of task ids; ids without a task are left out, in the order of the tasks."""
    try:
        named = TypeAdapter(dict[str, list[str]]).validate_python(_json(file))
    except ValidationError as error:
        raise UsageError(f"{file} cannot be read", got=_first(error), expected="lists of task ids by name") from error
    wanted = {name: set(ids) for name, ids in named.items()}
    return {name: [task.number for task in tasks if task.row.id in ids] for name, ids in wanted.items()}


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
