"""Prompts of a file, as in data sets for TRL or verl, each answered once. Rewards come from `agent.reward`.

With ``user: role``, a conversation replaces the prompt: a user who knows it, played by the runtime, begins.
"""

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, overload

import gymnasium

from agentrl.env import EnvironmentSpec, Isolation
from agentrl.errors import UsageError
from agentrl.message import Message, text_of
from agentrl.message.data_file import (
    MEDIA_COLUMNS,
    Row,
    UniqueIds,
    message_rows,
    read_messages,
    read_rows,
    refuse_media,
)
from agentrl.message.data_source import data_files
from agentrl.task import Task, contents_digest, task_contents

from .row_images import COLUMNS as IMAGE_COLUMNS
from .row_images import has_images, messages_with_images
from .split_files import files_by_split
from .verl_rows import column_object, row_type

NAME = "prompts"
AGENT, USER = "agent", "user"
USER_TURNS = 3
STOP = "#STOP#"
INSTRUCTIONS = """\
You are a user who talks to an assistant. This is what you need help with, in full:

{prompt}

Do not copy it. Begin with a short message that leaves out details, and give a detail when the assistant asks for it or
needs it. Write only your next message, in a few words. When the assistant has given you what you need, write {stop}."""
SPLITS = ("train", "valid", "test")
OWN_COLUMNS = ("prompt", "ground_truth", *IMAGE_COLUMNS)
PROMPT_COLUMNS = ("prompt", "question", "problem")
"""Columns with the prompt, in the order of preference: of TRL and verl, of verifiers, and of EasyR1."""
_OTHER_MEDIA = tuple(name for name in MEDIA_COLUMNS if name not in IMAGE_COLUMNS)


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


class PromptsWithUser(Prompts):
    """Conversation with a user who knows the prompt and reveals it step by step; the players are agent and user.

    It ends after the agent's answer to `user_turns` messages, or when the user writes ``#STOP#``.
    """

    def __init__(self, files: object = None, user: str = USER, user_turns: int = USER_TURNS) -> None:
        super().__init__(files)
        self._limit = user_turns
        self._answers, self._player = 0, AGENT

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Give the prompt to the user, who speaks first."""
        gymnasium.Env.reset(self, seed=seed)
        self._answers, self._player = 0, USER
        secret = INSTRUCTIONS.format(prompt=(options or {}).get("prompt", ""), stop=STOP)
        return "Write your first message.", {"players": [AGENT, USER], "player": USER, "instructions": {USER: secret}}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Pass a message on to the other player."""
        if self._player == AGENT:
            self._answers += 1
            self._player = USER
            over = self._answers >= self._limit
            return action.replace(STOP, ""), 0.0, over, False, {"player": USER}
        self._player = AGENT
        words = action.replace(STOP, "").strip() or "(says nothing)"
        return words, 0.0, self._answers > 0 and STOP in action, False, {"player": AGENT}


def make(*, files: object = None, user: str | None = None, user_turns: int | None = None) -> Prompts:
    """Create the environment.

    Raises:
        UsageError: an option is not valid.
    """
    _check_user(user, user_turns)
    if user is None:
        return Prompts(files)
    return PromptsWithUser(files, user_turns=USER_TURNS if user_turns is None else user_turns)


def roles_of(*, user: str | None = None, **_options: Any) -> tuple[str, ...]:
    """Return the roles that the runtime plays for the environment."""
    return () if user is None else (USER,)


def _check_user(user: str | None, user_turns: int | None) -> None:
    if user not in (None, "role"):
        raise UsageError("unknown user of prompts", got=repr(user), expected="role, or no user")
    if user is None and user_turns is not None:
        raise UsageError("the option user_turns of prompts has no effect without user=role", got=user_turns)
    if user_turns is not None and user_turns < 1:
        raise UsageError("the option user_turns of prompts is too small", got=user_turns, expected="at least 1")


def tasks(
    split: str,
    *,
    files: str | Mapping[str, str] | None = None,
    user: str | None = None,
    user_turns: int | None = None,
) -> Sequence[Task]:
    """Return the tasks of a split's file: JSON lines or Parquet, one prompt per row.

    Args:
        split: The split.
        files: A file for each split, or one name with ``{split}`` in it for all splits; also a folder, a pattern, or an
            ``hf://`` address.
        user: ``role`` for a conversation with a user who knows the prompt.
        user_turns: Maximum number of the user's messages; 3 by default.

    Raises:
        UsageError: the split has no file, a row has no prompt, or an option is not valid.
    """
    _check_user(user, user_turns)
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
    found, ids = PromptTasks(split), UniqueIds(f"the file of prompts {path}")
    for row in read_rows(path, "file of prompts"):
        ids.add(found.add(row).id, row.location)
    if not found:
        raise UsageError(f"the file of prompts {path} is empty", expected="at least one row")
    return found if user is None else [_hidden(task) for task in found]


def _hidden(task: Task) -> Task:
    """Return a task whose prompt only the user knows."""
    return replace(task, prompt=None, messages=(), options={"prompt": task.prompt})


class PromptTasks(Sequence[Task]):
    """Tasks of a file. Images are checked when a row is added, and read when its task is drawn: they may be large.

    Args:
        split: The split.
    """

    has_rows = True
    """True, as each task is a row of a file with its own columns; generated tasks have none."""

    def __init__(self, split: str) -> None:
        self._split = split
        self._found: list[Task | Row] = []

    def add(self, row: Row) -> Task:
        """Add the task of a row, and return it.

        Raises:
            UsageError: the row has no prompt, or an image cannot be read.
        """
        task = self._task(row, len(self._found))
        self._found.append(row if has_images(row, _prompt(row)) else task)
        return task

    def digest(self) -> str:
        """Return a digest of the rows, without the content of their images."""
        return contents_digest(self._found, lambda one: task_contents(one) if isinstance(one, Task) else one.values)

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        """Return a task, with its images."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        found = self._found[number]
        return found if isinstance(found, Task) else self._task(found, number)

    def _task(self, row: Row, index: int) -> Task:
        return _task(row, self._split, index + 1)


def shows_images(*, files: str | Mapping[str, str] | None = None, **_: Any) -> bool:
    """Return True if a row of the files has images; files that do not exist have none."""
    for name in files_by_split(files, SPLITS, "prompts").values() if files else ():
        with suppress(UsageError, OSError):
            if _shows_images(name, tuple(path.stat().st_mtime_ns for path in data_files(name))):
                return True
    return False


@functools.lru_cache
def _shows_images(files: str, _changed: tuple[int, ...]) -> bool:
    return any(has_images(row, _prompt(row)) for row in read_rows(files, "file of prompts"))


def _task(row: Row, split: str, number: int) -> Task:
    refuse_media(row.values, row.location, _OTHER_MEDIA)
    messages = _messages(row)
    answer = row.values.get("answer") if row.first("prompt", "question") is None else None  # next to a `problem`
    truths = [row.values.get("ground_truth"), column_object(row, "reward_model").get("ground_truth"), answer]
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
    """Return the prompt of a row: text, or rows of messages."""
    return message_rows(row.first(*PROMPT_COLUMNS), row.location)


def _messages(row: Row) -> tuple[Message, ...]:
    """Read the messages of a row whose prompt is a conversation or has images; return none for a prompt of text.

    Raises:
        UsageError: the prompt is missing, or the policy cannot answer it.
    """
    found, with_images = _prompt(row), has_images(row, _prompt(row))
    if isinstance(found, str) and found.strip():
        if not with_images:
            return ()
        found = [{"role": "user", "content": found}]
    expected = "text, or a list of messages that ends with the user's"
    if not isinstance(found, list) or not found or not all(isinstance(message, Mapping) for message in found):
        got = f"prompt: {found!r:.80}" if "prompt" in row.values else f"the columns {', '.join(row.columns)}"
        raise UsageError(f"{row.location} has no prompt", got=got, expected=f"prompt: {expected}")
    read = messages_with_images(row, found, row.folder) if with_images else read_messages(found, row.location)
    messages = tuple(read)
    roles, last = [message.role for message in messages], text_of(messages[-1].content).strip()
    if roles[-1] != "user" or "system" in roles[1:] or not last:
        got = f"messages of {', '.join(roles)}" if last else "an empty last message"
        raise UsageError(f"the prompt of {row.location} cannot be answered", got=got, expected=expected)
    return messages


SPEC = EnvironmentSpec(
    name=NAME,
    make=make,
    tasks=tasks,
    roles_of=roles_of,
    splits=SPLITS,
    description=(
        "Prompts of JSON-lines or Parquet files, each answered once and scored by reward functions (agent.reward), as"
        " data sets for TRL or verl are. Options: files (split to file, folder, pattern or hf:// address); user: role"
        " and user_turns for a simulated user who knows the prompt. A row has a prompt (text or messages), and may have"
        " ground_truth, images, id and type; reward functions find the columns in task.columns."
    ),
    max_turns=1,
    reward_range=(0.0, 0.0),
    isolation=Isolation.INLINE,
    images_of=shows_images,
)
