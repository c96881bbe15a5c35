"""Tasks of a config: a split of its environment, or a JSON Lines or Parquet file with one task per row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from agentrl.config.environment import EnvironmentConfig
from agentrl.env import EnvironmentSpec
from agentrl.env.lookup import check_split
from agentrl.errors import ConfigError, UsageError
from agentrl.message import Message
from agentrl.message.data_file import UniqueIds, read_messages, read_rows
from agentrl.observe.files import replace_file, writing
from agentrl.task import Task, TaskSource

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
    """Read all tasks of a file, in order.

    Args:
        path: JSON Lines or Parquet file; columns are the fields of `Task`, ``id`` defaults to the row number.
        environment: Environment of rows without that column.

    Raises:
        UsageError: the file cannot be read, a row has unknown columns, or two rows have the same id.
    """
    tasks, ids = [], UniqueIds(f"task file {path}")
    for number, row in enumerate(read_rows(path, "task file"), start=1):
        task = _task(row.values, row.location, number, environment)
        ids.add(task.id, row.location)
        tasks.append(task)
    if not tasks:
        raise UsageError(f"task file {path} is empty", expected="at least one row")
    return tasks


def _task(row: Mapping[str, Any], location: str, number: int, environment: str) -> Task:
    unknown = sorted(set(row) - set(_FIELDS))
    if unknown:
        raise UsageError(
            f"{location} has unknown columns",
            got=", ".join(unknown),
            expected=", ".join(_FIELDS),
            hint="options holds what the environment's reset reads, and columns what reward functions read",
        )
    given = {name: value for name, value in row.items() if value is not None}
    for name, (kind, expected) in _CHECKED.items():
        if name in given and (not isinstance(given[name], kind) or isinstance(given[name], bool)):
            raise UsageError(f"{name} of {location} has the wrong type", got=repr(given[name]), expected=expected)
    if "options" in given:  # merged data sets fill options of other rows with nulls
        given["options"] = {name: value for name, value in given["options"].items() if value is not None}
    if given.get("max_turns", 1) < 1:
        raise UsageError(f"max_turns of {location} is too small", got=given["max_turns"], expected="at least 1")
    if "messages" in given:
        given["messages"] = tuple(read_messages(_list(given["messages"], location), location))
    return Task(**{"environment": environment, **given, "id": str(given.get("id", number))})


def _list(value: Any, location: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        expected = "a list of messages"
        raise UsageError(f"messages of {location} have the wrong type", got=f"{value!r:.80}", expected=expected)
    return value


def _message_row(message: Message, task: Task) -> dict[str, str]:
    if not isinstance(message.content, str) or message.tool_calls:
        got = "a tool call" if message.tool_calls else "an image"
        raise UsageError(f"task {task.id} cannot be written to a task file", got=got, expected="messages of text")
    return {"role": message.role, "content": message.content}


def write_tasks(tasks: Iterable[Task], path: Path) -> None:
    """Write a file of tasks for `read_tasks`, one JSON object per line; replace an earlier file.

    Raises:
        UsageError: a task has images or other values that JSON cannot represent, or the file cannot be written.
    """
    rows = []
    for task in tasks:
        row = {name: value for name in _FIELDS if (value := getattr(task, name)) not in (None, (), {})}
        if task.messages:
            row["messages"] = [_message_row(message, task) for message in task.messages]
        try:
            rows.append(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))
        except TypeError as error:
            raise UsageError(
                f"task {task.id} cannot be written to a task file", got=str(error), expected="values of JSON types"
            ) from error
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, b"".join(row + b"\n" for row in rows))


def task_source(spec: EnvironmentSpec, config: EnvironmentConfig, *, split: str | None = None) -> TaskSource:
    """Return the tasks of a split, or of the config's file.

    `split` replaces the config's split or file.

    Raises:
        UsageError: the split does not exist, the environment does not accept an option, or the file cannot be read.
    """
    if config.tasks is not None and split is None:
        return read_tasks(config.tasks, environment=spec.name)
    chosen = check_split(spec, split or config.split)
    try:
        return spec.tasks(chosen, **{**spec.options, **config.options})
    except TypeError as error:
        raise ConfigError(
            f"environment.options are invalid for {spec.name}",
            got=", ".join(config.options) or "none",
            expected=f"only {', '.join(spec.options)}" if spec.options else "no options",
            hint=str(error),
        ) from error
