"""Prompts of a file, each answered once: what a data set for TRL or verl is. Rewards come from `agent.reward`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import UsageError
from agentrl.task import Task, read_rows

from .split_files import files_by_split

NAME = "prompts"
SPLITS = ("train", "valid", "test")
OWN_COLUMNS = ("prompt", "id", "type", "ground_truth")


class Prompts(gymnasium.Env[str, str]):
    """Ends with the first answer, and gives no reward: reward functions do."""

    observation_space = action_space = gymnasium.spaces.Text(200)

    def __init__(self, files: object = None) -> None:
        """The files are the business of the task source."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Say nothing: the task holds the prompt."""
        super().reset(seed=seed)
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End."""
        return "", 0.0, True, False, {}


def tasks(split: str, *, files: str | Mapping[str, str] | None = None) -> Sequence[Task]:
    """The tasks of a split's file: JSON lines or Parquet, one prompt per row.

    Args:
        split: Which file.
        files: A file for each split; a name with ``{split}`` in it for all.

    Raises:
        UsageError: there is no file for the split, or a row has no prompt.
    """
    if not files:
        raise UsageError(
            f"which prompts are in {split} is not known",
            got="no files",
            expected="--tasks prompts.jsonl, or environment.options={files: {train: prompts.jsonl}}",
        )
    chosen = files_by_split(files, SPLITS, "prompts")
    if split not in chosen:
        raise UsageError(
            f"there is no file of prompts for split {split}",
            got=", ".join(f"{name}: {file}" for name, file in chosen.items()),
            expected=f"environment.options.files.{split}=FILE",
            hint="to evaluate prompts of another file: agentrl eval --prompts FILE",
        )
    path = chosen[split]
    found = list(_tasks(Path(path), split))
    if not found:
        raise UsageError(f"the file of prompts {path} is empty", expected="at least one row")
    if len({task.id for task in found}) < len(found):
        raise UsageError(f"the file of prompts {path} has two rows of one id", expected="unique ids")
    return found


def _tasks(path: Path, split: str) -> Iterator[Task]:
    for number, row in enumerate(read_rows(path), start=1):
        place = f"{path} row {number}"
        yield Task(
            id=str(row.get("id", f"{split}-{number}")),
            environment=NAME,
            seed=number,
            prompt=_prompt(row, place),
            ground_truth=_ground_truth(row),
            type=None if row.get("type") is None else str(row["type"]),
            columns={name: value for name, value in row.items() if name not in OWN_COLUMNS},
        )


def _prompt(row: Mapping[str, Any], place: str) -> str:
    """Text, or the contents of a system and a user message, as data sets of conversations have them."""
    found = row.get("prompt")
    if isinstance(found, str) and found.strip():
        return found
    expected = "text, or a list of a user message, and perhaps a system message before it"
    if not isinstance(found, list) or not all(isinstance(message, Mapping) for message in found):
        got = f"prompt: {found!r}" if "prompt" in row else f"the columns {', '.join(row)}"
        raise UsageError(f"{place} has no prompt", got=got, expected=f"prompt: {expected}")
    roles = [message.get("role") for message in found]
    if roles not in (["user"], ["system", "user"]) or not all(isinstance(m.get("content"), str) for m in found):
        raise UsageError(f"the prompt of {place} is no single question", got=f"messages of {roles}", expected=expected)
    return "\n\n".join(message["content"] for message in found)


def _ground_truth(row: Mapping[str, Any]) -> Any:
    """The column of this name, or what data sets of verl have in its place."""
    model = row.get("reward_model")
    return row.get("ground_truth", model.get("ground_truth") if isinstance(model, Mapping) else None)


SPEC = EnvironmentSpec(
    name=NAME,
    make=Prompts,
    tasks=tasks,
    splits=SPLITS,
    description=(
        "Prompts of JSON-lines or Parquet files, each answered once and scored by reward functions (agent.reward), as"
        " data sets for TRL or verl are. Option: files (split to path). A row has a prompt (text or messages), and may"
        " have ground_truth, id and type; reward functions find all other columns in task.columns."
    ),
    max_turns=1,
    reward_range=(0.0, 0.0),
    isolation=Isolation.INLINE,
)
