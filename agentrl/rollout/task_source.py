"""Tasks of a config: a split of its environment, or a JSON Lines or Parquet file with one task per row."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from agentrl.config.config import Config
from agentrl.config.derived import EnvironmentConfigs, most_turns, per_environment_configs
from agentrl.config.environment import EnvironmentConfig
from agentrl.env import EnvironmentSpec
from agentrl.env.lookup import check_split, resolve_environment
from agentrl.errors import UnknownNameError, UsageError
from agentrl.message import Message
from agentrl.message.data_file import UniqueIds, read_messages, read_rows
from agentrl.observe.files import replace_file, writing
from agentrl.task import Task, TaskSource

_log = logging.getLogger(__name__)
_FIELDS = tuple(field.name for field in fields(Task))
_CHECKED: Mapping[str, tuple[Any, str]] = {
    "seed": (int, "a whole number"),
    "options": (Mapping, "an object"),
    "columns": (Mapping, "an object"),
    "prompt": (str, "text, or a list of messages"),
    "type": ((str, int), "text"),
    "environment": (str, "text"),
    "max_turns": (int, "a whole number"),
}


def read_tasks(path: str | Path, *, environment: str, reset_columns: bool = False) -> Sequence[Task]:
    """Read all tasks of a file, in order.

    Args:
        path: JSON Lines or Parquet file; columns are the fields of `Task`, ``id`` defaults to the row number, and
            ``prompt`` may be a list of messages.
        environment: Environment of rows without that column.
        reset_columns: Use all columns as options of `reset`, and those that are not fields of `Task` for reward
            functions, as TRL does; by default, other columns are errors.

    Raises:
        UsageError: the file cannot be read, a row has unknown columns, two rows have the same id, or the rows name
            several environments.
    """
    tasks, ids = [], UniqueIds(f"task file {path}")
    for number, row in enumerate(read_rows(path, "task file"), start=1):
        values = _with_reset_columns(row.values) if reset_columns else row.values
        task = _task(values, row.location, number, environment)
        ids.add(task.id, row.location)
        tasks.append(task)
        if reset_columns and number == 1 and (pictured := row.values.keys() & {"images", "image"}):
            _log.warning("%s: the model does not see column %s; reset can return its images", path, min(pictured))
    if not tasks:
        raise UsageError(f"task file {path} is empty", expected="at least one row")
    if len(named := sorted({task.environment for task in tasks})) > 1:
        raise UsageError(
            f"task file {path} has rows for several environments",
            got=f"environment {', '.join(named)}",
            expected="the rows of one environment in a file",
            hint="split the file, and train on all of them: environments: "
            f"{{{named[0]}: {{name: …, tasks: {named[0]}.jsonl}}, {named[1]}: {{name: …, tasks: {named[1]}.jsonl}}}}",
        )
    return tasks


def _with_reset_columns(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row whose columns are options of `reset`, and columns for reward functions.

    A column that has the name of a field of `Task`, but another type, is not a field: ``options`` may be a list of
    choices.
    """
    given = {name: value for name, value in row.items() if value is not None}
    wrong = {name for name in _CHECKED if name != "prompt" and name in given and not _is_valid(name, given[name])}
    kept = {name: value for name, value in given.items() if name in _FIELDS and name not in wrong}
    own = {"options", "columns"} - wrong
    passed = {name: value for name, value in given.items() if name not in own}
    scored = {name: value for name, value in row.items() if name not in own | {"prompt", "messages", "ground_truth"}}
    return {
        **kept,
        "options": {**passed, **kept.get("options", {})},
        "columns": {**scored, **kept.get("columns", {})},
    }


def _is_valid(name: str, value: Any) -> bool:
    return isinstance(value, _CHECKED[name][0]) and not isinstance(value, bool)


def _task(row: Mapping[str, Any], location: str, number: int, environment: str) -> Task:
    unknown = sorted(set(row) - set(_FIELDS))
    if unknown:
        raise UsageError(
            f"{location} has unknown columns",
            got=", ".join(unknown),
            expected=", ".join(_FIELDS),
            hint=f'write values for the environment\'s reset as "options": {{"{unknown[0]}": …}}, and values for '
            f'reward functions as "columns": {{"{unknown[0]}": …}}',
        )
    given = {name: value for name, value in row.items() if value is not None}
    if isinstance(given.get("prompt"), list) and "messages" not in given:
        given["messages"] = given.pop("prompt")
    for name, (_, expected) in _CHECKED.items():
        if name in given and not _is_valid(name, given[name]):
            raise UsageError(
                f"{name} of {location} has the wrong type",
                got=repr(given[name]),
                expected=expected,
                hint=f'rename the column if it is not meant as the {name} of a task; "options" holds values for reset, '
                'and "columns" those for reward functions',
            )
    if "type" in given:
        given["type"] = str(given["type"])
    if "options" in given:  # merged data sets fill options of other rows with nulls
        given["options"] = {name: value for name, value in given["options"].items() if value is not None}
    if given.get("max_turns", 1) < 1:
        raise UsageError(f"max_turns of {location} is too small", got=given["max_turns"], expected="at least 1")
    if "messages" in given:
        rows = _list(given["messages"], location)
        if any(_has_image(row.get("content")) for row in rows if isinstance(row, Mapping)):
            raise UsageError(
                f"the prompt of {location} has an image",
                expected="text; the environment shows images",
                hint='reset may return them: [{"type": "image", "image": "data:…"}], or the environment prompts reads '
                "them from rows; see docs/concepts/vision.md",
            )
        messages = given["messages"] = tuple(read_messages(rows, location))
        given.setdefault("prompt", "\n\n".join(message.text for message in messages))
    return Task(**{"environment": environment, **given, "id": str(given.get("id", number))})


def _has_image(content: Any) -> bool:
    return isinstance(content, list) and any(
        "image" in str(one.get("type")) for one in content if isinstance(one, dict)
    )


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
        return read_tasks(config.tasks, environment=spec.name, reset_columns=spec.reset_columns)
    return spec.tasks_under(check_split(spec, split or config.split), config.options)


def limited_by_tasks(config: Config) -> Config:
    """Return a config for estimates, whose ``max_turns`` are at most the largest of the tasks' own limits.

    Only a list of tasks, such as that of a file, is read for this; generated tasks rarely have limits of their own.

    Raises:
        UsageError: the tasks cannot be read.
    """
    if not config.has_environment or config.trainer.episodes is not None:
        return config
    limits = {part.label: limit for part in per_environment_configs(config) if (limit := _limit_of_tasks(part))}
    if not limits:
        return config
    if not config.environments:
        (limit,) = limits.values()
        return config.model_copy(update={"agent": config.agent.model_copy(update={"max_turns": limit})})
    entries = dict(config.environments)
    for label, limit in limits.items():
        changes = entries[label].agent.model_copy(update={"max_turns": limit})
        entries[label] = entries[label].model_copy(update={"agent": changes})
    return config.model_copy(update={"environments": entries})


def _limit_of_tasks(part: EnvironmentConfigs) -> int | None:
    """Return the largest limit of an environment's tasks; ``None`` if it does not bound the turns of all episodes."""
    try:
        spec, most = resolve_environment(part.config.sole_environment.name), most_turns(part)
    except UnknownNameError:  # a plan of a trainer alone
        return None
    source = task_source(spec, part.config.sole_environment) if most > 1 else ()
    own = [task.max_turns for task in source] if isinstance(source, list | tuple) else []
    largest = max((most if limit is None else limit for limit in own), default=most)
    return largest if largest < most else None
