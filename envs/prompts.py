"""Prompts of a file, each answered once, as in data sets for TRL or verl. Rewards come from `agent.reward`."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import UsageError
from agentrl.message import Message
from agentrl.message.data_file import Row, message_rows, read_messages, read_rows, refuse_media
from agentrl.task import Task

from .split_files import files_by_split
from .verl_rows import column_object, row_type

NAME = "prompts"
SPLITS = ("train", "valid", "test")
OWN_COLUMNS = ("prompt", "ground_truth")


class Prompts(gymnasium.Env[str, str]):
    """Environment that ends with the first answer and gives no reward; reward functions do."""

    observation_space = action_space = gymnasium.spaces.Text(200)

    def __init__(self, files: object = None) -> None:
        """Accept the option `files`, which only the task source reads."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Return an empty observation: the task contains the prompt."""
        super().reset(seed=seed)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode."""
        return "", 0.0, True, False, {}


def tasks(split: str, *, files: str | Mapping[str, str] | None = None) -> Sequence[Task]:
    """Return the tasks of a split's file: JSON lines or Parquet, one prompt per row.

    Args:
        split: The split.
        files: A file for each split, or one name with ``{split}`` in it for all splits; also a folder, a pattern, or an
            ``hf://`` address.

    Raises:
        UsageError: the split has no file, or a row has no prompt.
    """
    if not files:
        raise UsageError(
            f"the prompts of split {split} are not set",
            got="no files",
            expected="--tasks prompts.jsonl, or environment.options={files: {train: prompts.jsonl}}",
        )
    chosen = files_by_split(files, SPLITS, "prompts")
    if split not in chosen:
        raise UsageError(
            f"split {split} has no file of prompts",
            got=", ".join(f"{name}: {file}" for name, file in chosen.items()),
            expected=f"environment.options.files.{split}=FILE",
            hint="to evaluate prompts of another file: agentrl eval --prompts FILE",
        )
    path = chosen[split]
    found = [_task(row, split, number) for number, row in enumerate(read_rows(path, "file of prompts"), start=1)]
    if not found:
        raise UsageError(f"the file of prompts {path} is empty", expected="at least one row")
    if len({task.id for task in found}) < len(found):
        raise UsageError(f"the file of prompts {path} has two rows with the same id", expected="unique ids")
    return found


def _task(row: Row, split: str, number: int) -> Task:
    refuse_media(row.values, row.location)
    messages = _messages(row)
    truths = [row.values.get("ground_truth"), column_object(row, "reward_model").get("ground_truth")]
    given = row.values.get("id")
    return Task(
        id=f"{split}-{number}" if given is None else str(given),
        environment=NAME,
        seed=number,
        prompt="\n\n".join(message.text for message in messages) if messages else str(_prompt(row)),
        messages=messages,
        ground_truth=next((truth for truth in truths if truth is not None), None),
        type=row_type(row, "type"),
        columns={name: value for name, value in row.values.items() if name not in OWN_COLUMNS},
    )


def _prompt(row: Row) -> Any:
    """Return the prompt of a row; data sets for verifiers may have a ``question`` instead."""
    prompt = row.values.get("prompt")
    return message_rows(row.values.get("question") if prompt is None else prompt)


def _messages(row: Row) -> tuple[Message, ...]:
    """Read the messages of a row whose prompt is a conversation; return none for a prompt of text.

    Raises:
        UsageError: the prompt is missing, or the policy cannot answer it.
    """
    found = _prompt(row)
    if isinstance(found, str) and found.strip():
        return ()
    expected = "text, or a list of messages that ends with the user's"
    if not isinstance(found, list) or not found or not all(isinstance(message, Mapping) for message in found):
        got = f"prompt: {found!r:.80}" if "prompt" in row.values else f"the columns {', '.join(row.columns)}"
        raise UsageError(f"{row.location} has no prompt", got=got, expected=f"prompt: {expected}")
    messages = tuple(read_messages(found, row.location))
    roles = [message.role for message in messages]
    if roles[-1] != "user" or "system" in roles[1:] or not messages[-1].text.strip():
        got = f"messages of {', '.join(roles)}" if messages[-1].text.strip() else "an empty last message"
        raise UsageError(f"the prompt of {row.location} cannot be answered", got=got, expected=expected)
    return messages


SPEC = EnvironmentSpec(
    name=NAME,
    make=Prompts,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "Prompts of JSON-lines or Parquet files, each answered once and scored by reward functions (agent.reward), as"
        " data sets for TRL or verl are. Option: files (split to file, folder, pattern or hf:// address). A row has a"
        " prompt (text or messages), and may have ground_truth, id and type; reward functions find the columns in"
        " task.columns."
    ),
    max_turns=1,
    reward_range=(0.0, 0.0),
    isolation=Isolation.INLINE,
)
