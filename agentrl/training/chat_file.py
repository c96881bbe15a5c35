"""Conversations of a file as trajectories for SFT; the assistant's messages are trained on.

A row is ``{"messages": [{"role": "user", "content": "…"}, …], "tools": […]}``, the format of chat services, or
``{"prompt": …, "completion": …}`` of TRL, in which the prompt is only context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentrl.errors import Outcome, TemplateError, UsageError
from agentrl.message import Message, Role
from agentrl.message.data_file import Row, ToolSchema, message_rows, read_messages, read_rows, read_tools, refuse_media
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import OmittedText, Renderer
from agentrl.render.template_check import check_template
from agentrl.trajectory import Source, Trajectory

ENVIRONMENT = "chat"
"""Environment name of trajectories from a file."""
SYSTEM_COLUMNS = ("system", "system_prompt")
"""Columns of a row that may contain the system message."""
TOOL_COLUMNS = ("tools", "tool_defs")
"""Columns of a row that may contain the schemas of its tools; the first that is not null counts."""
TRAINING_KEYS = ("weight", "train", "training", "trainable", "loss")
"""Keys of a message that fine-tuning tools use to mark whether an answer is trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Conversation of a file."""

    location: str
    """File and line, for error messages."""
    messages: tuple[Message, ...]
    """Messages up to the last answer."""
    tools: tuple[ToolSchema, ...]
    context_only: Set[int] = frozenset()
    """Indices in `messages` of the answers that are not trained on."""

    @property
    def follow_ups(self) -> set[Role]:
        """Roles of the messages after the first answer, except the assistant."""
        first = next(number for number, message in enumerate(self.messages) if message.role == "assistant")
        return {message.role for message in self.messages[first:] if message.role != "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTDataset:
    """Trajectories of a conversation file, for SFT."""

    trajectories: list[Trajectory]
    too_long: int
    """Number of conversations that were skipped because they are too long."""


def read_chats(path: str | Path) -> list[Chat]:
    """Read the conversations of a file of JSON lines or Parquet.

    Raises:
        UsageError: the file cannot be read, or a row is not a conversation with an answer; names the line.
    """
    chats = [chat_of(row) for row in read_rows(path, "conversations")]
    if not chats:
        raise UsageError(f"{path} is empty", expected="at least one conversation")
    return chats


def check_chats(chats: Sequence[Chat], renderer: Renderer) -> None:
    """Check that the chat template shows conversations, with their tools, calls and texts, turn by turn.

    Raises:
        TemplateError: it leaves out tools or calls, rewrites history, or leaves out the text or thinking of an answer.
    """
    roles: set[Role] = set().union(*(chat.follow_ups for chat in chats))
    tools = next((chat.tools for chat in chats if chat.tools), ())
    has_calls = any(message.tool_calls for chat in chats for message in chat.messages)
    check_template(renderer, roles=sorted(roles), tools=tools, has_calls=has_calls)
    _check_texts_shown(chats, renderer)


def _check_texts_shown(chats: Sequence[Chat], renderer: Renderer) -> None:
    """Check that answers with thinking, or with text next to calls, are rendered whole.

    Raises:
        TemplateError: some are not; the message has their number and the location of the first.
    """
    count, omitted = 0, 0
    first: tuple[str, OmittedText] | None = None
    for chat in chats:
        for number, message in enumerate(chat.messages):
            if message.role != "assistant" or not _has_parts(message, renderer):
                continue
            count += 1
            try:
                renderer.answer_text(message)
            except OmittedText as error:
                omitted += 1
                first = first or (f"{chat.location}, message {number + 1}", error)
    if first is not None:
        place, fault = first
        raise TemplateError(
            f"{fault.what}, so the model would not learn it",
            got=f"{omitted} of {count} answers with thinking or text next to calls, the first in {place}: {fault.got}",
            expected=str(fault.expected),
            hint=f"{fault.hint}; or remove what the template leaves out from the file",
        )


def _has_parts(message: Message, renderer: Renderer) -> bool:
    """Return True if an answer has thinking, separate or within its text, or text next to calls."""
    is_mixed = bool(message.tool_calls and message.text)
    return is_mixed or bool(message.reasoning) or renderer.thinking.close in message.text


def build_sft_dataset(chats: Sequence[Chat], renderer: Renderer, *, max_tokens: int) -> SFTDataset:
    """Tokenize conversations as trajectories in which the assistant's tokens are trained on.

    Args:
        chats: Conversations in the order of the file.
        renderer: Renderer of the model that is trained.
        max_tokens: Maximum tokens of a conversation.

    Raises:
        TemplateError: the model's chat template cannot render them turn by turn.
        UsageError: all conversations are too long.
    """
    check_chats(chats, renderer)
    found = [to_trajectory(chat, renderer) for chat in chats]
    fitting = [trajectory for trajectory in found if len(trajectory.sequences[0]) <= max_tokens]
    if not fitting:
        shortest = min(len(trajectory.sequences[0]) for trajectory in found)
        raise UsageError(
            "all conversations are longer than agent.max_tokens",
            got=f"{len(found)} conversations, the shortest of {shortest:,} tokens",
            expected=f"at most {max_tokens:,} tokens",
            hint="raise agent.max_tokens",
        )
    return SFTDataset(trajectories=fitting, too_long=len(found) - len(fitting))


def to_trajectory(chat: Chat, renderer: Renderer) -> Trajectory:
    """Tokenize a conversation as a trajectory in which the assistant's tokens are trained on."""
    trajectory = Trajectory(
        id=chat.location,
        task_id=chat.location,
        environment=ENVIRONMENT,
        seed=0,
        group_id=chat.location,
        outcome=Outcome.FINISHED,
    )
    first = next(number for number, message in enumerate(chat.messages) if message.role == "assistant")
    conversation = LedgerConversation(renderer, trajectory, chat.messages[:first], tools=chat.tools)
    calls, ids, unanswered = 0, dict[str, str](), list[str]()
    for number, message in enumerate(chat.messages[first:], start=first):
        if message.role == "assistant":
            source = Source.MISTAKE if number in chat.context_only else Source.FORCED
            conversation.demonstrate(renderer.answer_text(message, earlier_calls=calls), source=source)
            unanswered = [renderer.call_id(call.name, index) for index, call in enumerate(message.tool_calls, calls)]
            ids |= {call.id: shown for call, shown in zip(message.tool_calls, unanswered, strict=True) if call.id}
            calls += len(message.tool_calls)
            continue
        if message.role == "tool":  # rendered calls have ids in the family's format; so must results
            next_id = unanswered.pop(0) if unanswered else message.tool_call_id
            given = message.tool_call_id
            message = replace(message, tool_call_id=ids.get(given, given) if given else next_id)
        conversation.add([message])
    return trajectory


def chat_of(row: Row) -> Chat:
    """Read the conversation of a row.

    Raises:
        UsageError: the row is not a conversation with an answer.
    """
    values, location = row.values, row.location
    prompt, rows = list[Any](), message_rows(values.get("messages"), location)
    if not isinstance(rows, list):
        prompt, rows = answer_rows(values, "completion")
        if not rows or "label" in values:  # a column of KTO: answers may be bad
            raise UsageError(
                f"{location} is not a conversation",
                got=f"the columns {', '.join(row.columns)}",
                expected='{"messages": [{"role": …}, …]}, or {"prompt": …, "completion": …}',
            )
    _refuse_untrained(row)
    prompt = [*_system_rows(row, [*prompt, *rows]), *prompt]
    rows = [*prompt, *rows]
    tools = read_tools(next((values[name] for name in TOOL_COLUMNS if values.get(name) is not None), None), location)
    messages = list(read_messages(rows, location, tools=tools))
    while messages and messages[-1].role != "assistant":
        messages.pop()
    context_only = frozenset(
        number
        for number, message in enumerate(messages)
        if not _is_learned(rows[number], location) or (number < len(prompt) and message.role == "assistant")
    )
    _check_answers(messages, context_only, location)
    return Chat(location=location, messages=tuple(messages), tools=tools, context_only=context_only)


def answer_rows(values: Mapping[str, Any], column: str) -> tuple[list[Any], list[Any]]:
    """Return the messages of a row's column ``prompt``, and those of another column, which continue them.

    A text is a message of the user, or an answer (TRL's standard format). A prompt that the other messages repeat
    (UltraFeedback) does not count. Other values are no messages.
    """
    prompt, own = (message_rows(values.get(name)) for name in ("prompt", column))
    if isinstance(own, str) and prompt is not None:
        own = [{"role": "assistant", "content": own}]
    own = own if isinstance(own, list) else []
    if isinstance(prompt, str):
        question = {"role": "user", "content": prompt}
        prompt = [] if any(isinstance(row, dict) and row.items() >= question.items() for row in own) else [question]
    return (prompt if isinstance(prompt, list) else []), own


def _refuse_untrained(row: Row) -> None:
    """Raise `UsageError` for columns that would be ignored."""
    refuse_media(row.values, row.location)
    if row.values.get("functions"):
        raise UsageError(
            f"{row.location} has a column functions", got="functions", expected='tools: [{"function": {…}}]'
        )


def _system_rows(row: Row, rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the system message of a row that has it in a separate column.

    Raises:
        UsageError: the column is not text, or the messages begin with another system message.
    """
    given = {name: row.values[name] for name in SYSTEM_COLUMNS if row.values.get(name) not in (None, "")}
    first = rows[0] if rows and isinstance(rows[0], dict) else {}
    texts = [*given.values(), *([first.get("content")] if first.get("role") == "system" else [])]
    if not all(isinstance(text, str) for text in given.values()) or any(text != texts[0] for text in texts):
        raise UsageError(
            f"{row.location} has a column {' and a column '.join(given)} that cannot be used",
            got=" and ".join(f"{text!r:.80}" for text in texts),
            expected="one text, and no other system message",
        )
    return [{"role": "system", "content": texts[0]}] if given and len(texts) == len(given) else []


def _is_learned(row: Mapping[str, Any], location: str) -> bool:
    """Return True if an answer is trained on, that is, if no key of `TRAINING_KEYS` has the value 0 or false."""
    is_answer = row["role"] == "assistant"
    marks = {name: row[name] for name in TRAINING_KEYS if row.get(name) is not None}
    is_known = all(isinstance(mark, int | float) and mark in (0, 1) for mark in marks.values())
    if is_known and len(set(marks.values())) <= 1 and (is_answer or not any(marks.values())):
        return not is_answer or all(marks.values())
    names = " and ".join(marks)
    expected = "0 (context only) or 1 (trained on)" if is_answer else "1 for the assistant's messages only"
    raise UsageError(
        f"{location}: the {names} of a message cannot be used",
        got=f"{row['role']}: {', '.join(f'{mark!r:.80}' for mark in marks.values())}",
        expected=expected,
    )


def _check_answers(messages: Sequence[Message], context_only: Set[int], location: str) -> None:
    answers = [message.role == "assistant" for message in messages]
    if not any(answers):
        raise UsageError(
            f"{location} has nothing to learn", got="no answer", expected="a message of the role assistant"
        )
    if all(number in context_only for number, is_answer in enumerate(answers) if is_answer):
        raise UsageError(
            f"{location} has nothing to learn",
            got="weight: 0 or train: false for every answer",
            expected="an answer to train on",
        )
    if any(not (one.content or one.tool_calls or one.reasoning) for one in messages if one.role == "assistant"):
        raise UsageError(
            f"{location} has an empty answer", expected="content or tool_calls in each of the assistant's messages"
        )
    if answers[0] or any(one and next_ for one, next_ in pairwise(answers)):
        raise UsageError(
            f"{location}: an answer follows no message", expected="a user's or a tool's message before each answer"
        )
