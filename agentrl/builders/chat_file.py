"""Conversations in a file as trajectories to learn from: what the assistant says there is what a demonstrator did.

A row is ``{"messages": [{"role": "user", "content": "…"}, …], "tools": […]}``, as chat services take and give it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from agentrl.data_file import Row, read_rows
from agentrl.errors import Outcome, UsageError
from agentrl.message import Message, Role, ToolCall
from agentrl.render.check import check_template
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import Renderer
from agentrl.render.tokens import ToolSchema
from agentrl.trajectory import Source, Trajectory

ENVIRONMENT = "chat"
"""Stands for the environment in trajectories that come from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation of a file."""

    place: str
    """File and line, for messages to people."""
    messages: tuple[Message, ...]
    """Up to the last answer."""
    tools: tuple[ToolSchema, ...]
    context_only: Set[int] = frozenset()
    """Numbers of the answers among `messages` that are not trained on."""

    @property
    def follow_ups(self) -> set[Role]:
        """Roles of messages that come after an answer."""
        first = next(number for number, message in enumerate(self.messages) if message.role == "assistant")
        return {message.role for message in self.messages[first:] if message.role != "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """Lessons of a file."""

    trajectories: list[Trajectory]
    too_long: int
    """Conversations that were left out, for they do not fit."""


def read_chats(path: str | Path) -> list[Chat]:
    """Read the conversations of a file of JSON lines or Parquet.

    Raises:
        UsageError: the file cannot be read, or a row is not a conversation with an answer; names the line.
    """
    chats = [_chat(row) for row in read_rows(path, "conversations")]
    if not chats:
        raise UsageError(f"{path} is empty", expected="at least one conversation")
    return chats


def lessons(chats: Sequence[Chat], renderer: Renderer, *, max_tokens: int) -> Lessons:
    """Conversations as tokens, of which the assistant's are trained on.

    Args:
        chats: In the order of the file.
        renderer: Of the model that learns.
        max_tokens: Longest conversation.

    Raises:
        TemplateError: the model's template cannot show them turn by turn.
        UsageError: none of them fits.
    """
    roles: set[Role] = set().union(*(chat.follow_ups for chat in chats))
    if roles:
        tools = next((chat.tools for chat in chats if chat.tools), ())
        check_template(renderer, roles=sorted(roles), tools=tools)
    found = [_written(chat, renderer) for chat in chats]
    fitting = [trajectory for trajectory in found if len(trajectory.sequences[0]) <= max_tokens]
    if not fitting:
        shortest = min(len(trajectory.sequences[0]) for trajectory in found)
        raise UsageError(
            "no conversation fits agent.max_tokens",
            got=f"{len(found)} conversations, the shortest of {shortest:,} tokens",
            expected=f"at most {max_tokens:,} tokens",
            hint="raise agent.max_tokens",
        )
    return Lessons(trajectories=fitting, too_long=len(found) - len(fitting))


def _written(chat: Chat, renderer: Renderer) -> Trajectory:
    trajectory = Trajectory(
        id=chat.place,
        task_id=chat.place,
        environment=ENVIRONMENT,
        seed=0,
        group_id=chat.place,
        outcome=Outcome.FINISHED,
    )
    first = next(number for number, message in enumerate(chat.messages) if message.role == "assistant")
    conversation = LedgerConversation(renderer, trajectory, chat.messages[:first], tools=chat.tools)
    calls = 0
    for number, message in enumerate(chat.messages[first:], start=first):
        if message.role == "assistant":
            source = Source.MISTAKE if number in chat.context_only else Source.FORCED
            conversation.demonstrate(renderer.answer_text(message, earlier_calls=calls), source=source)
            calls += len(message.tool_calls)
        else:
            conversation.add([message])
    return trajectory


def _chat(row: Row) -> Chat:
    values, place = row.values, row.place
    rows = values.get("messages")
    if not isinstance(rows, list):
        expected = '{"messages": [{"role": …}, …]}'
        raise UsageError(f"{place} is not a conversation", got=f"the columns {', '.join(row.columns)}", expected=expected)
    _refuse_untrained(row)
    tools = _tools(values.get("tools"), place)
    messages = list(_messages(rows, tools, place))
    while messages and messages[-1].role != "assistant":
        messages.pop()
    context_only = frozenset(number for number in range(len(messages)) if not _is_learned(rows[number], place))
    _check_answers(messages, context_only, place)
    return Chat(place=place, messages=tuple(messages), tools=tools, context_only=context_only)


def _refuse_untrained(row: Row) -> None:
    """Refuse columns whose contents would be left out of what the model reads."""
    for name in ("images", "image", "videos", "audios"):
        if row.values.get(name):
            raise UsageError(
                f"{row.place} has a column {name}",
                got=f"{name} beside messages, which sft does not train on",
                expected="conversations of text",
                hint=f"remove the column {name}, and the rows that need it",
            )
    if row.values.get("functions"):
        raise UsageError(f"{row.place} has functions", got="functions", expected='tools: [{"function": {…}}]')


def _is_learned(row: Mapping[str, Any], place: str) -> bool:
    """Read the ``weight`` of a message, as fine-tuning services have it: 0 makes an answer context only."""
    weight = row.get("weight")
    is_answer = row["role"] == "assistant"
    if weight is None or weight == 0 or (weight == 1 and is_answer):
        return not is_answer or weight != 0
    expected = "0 (context only) or 1 (trained on)" if is_answer else "a weight of the assistant's messages only"
    raise UsageError(f"{place}: the weight of a message cannot be used", got=f"{row['role']}: {weight}", expected=expected)


def _tools(found: Any, place: str) -> tuple[ToolSchema, ...]:
    """Read the schemas of a conversation's tools: a list, or its JSON text."""
    try:
        tools = json.loads(found) if isinstance(found, str) and found else found or []
        schemas = [_without_nulls(tool) for tool in tools]
        if isinstance(tools, list) and all(isinstance(schema["function"]["name"], str) for schema in schemas):
            return tuple(schemas)
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    expected = '[{"function": {"name": …}}]'
    raise UsageError(f"{place}: tools are not a list of schemas", got=str(found)[:80], expected=expected)


def _without_nulls(value: Any) -> Any:
    """Remove the keys of a schema that were filled with nulls where data sets were merged."""
    if isinstance(value, dict):
        kept = ("default", "const", "enum")
        return {name: _without_nulls(item) for name, item in value.items() if item is not None or name in kept}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _check_answers(messages: Sequence[Message], context_only: Set[int], place: str) -> None:
    answers = [message.role == "assistant" for message in messages]
    if not any(answers):
        raise UsageError(f"{place} has nothing to learn", got="no answer", expected="a message of the role assistant")
    if all(number in context_only for number, is_answer in enumerate(answers) if is_answer):
        raise UsageError(
            f"{place} has nothing to learn", got="weight 0 for every answer", expected="an answer of weight 1, or none"
        )
    if any(not (one.content or one.tool_calls or one.reasoning) for one in messages if one.role == "assistant"):
        raise UsageError(
            f"{place} has an empty answer", expected="content or tool_calls in each of the assistant's messages"
        )
    if answers[0] or any(one and next_ for one, next_ in pairwise(answers)):
        raise UsageError(f"{place}: an answer answers nothing", expected="a user's or a tool's message before each")


def _messages(rows: Sequence[Any], tools: Sequence[ToolSchema], place: str) -> Iterator[Message]:
    names: dict[str, str] = {}
    for row in rows:
        if not isinstance(row, dict) or row.get("role") not in get_args(Role):
            raise UsageError(f"{place}: a message has no known role", got=str(row)[:80], expected=get_args(Role))
        if row.get("function_call"):
            raise UsageError(f"{place}: a message has a function_call", got="function_call", expected="tool_calls")
        given = row.get("tool_calls") or []
        if not isinstance(given, list):
            raise UsageError(f"{place}: tool_calls are not a list", got=str(given)[:80], expected="a list of calls")
        calls = tuple(_call(call, tools, place) for call in given)
        names |= {call.id: call.name for call in calls}
        answered = _optional_text(row, "tool_call_id", place)
        name = _optional_text(row, "name", place) or names.get(answered or "")
        reasoning = _optional_text(row, "reasoning_content", place) or _optional_text(row, "reasoning", place)
        yield Message(
            role=row["role"],
            content=_text(row.get("content"), place),
            tool_calls=calls,
            tool_call_id=answered,
            name=name if row["role"] == "tool" else None,
            reasoning=reasoning,
        )


def _optional_text(row: Mapping[str, Any], name: str, place: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{place}: {name} of a message is not text", got=str(value)[:80], expected="text")
    return value


def _text(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise UsageError(
            f"{place}: a message is not text",
            got=str(content)[:80],
            expected="text, or parts of text: sft does not train on images",
        )
    return "".join(part["text"] for part in parts)


def _call(call: Any, tools: Sequence[ToolSchema], place: str) -> ToolCall:
    """Read a tool call, its arguments written as JSON or as an object."""
    try:
        function: Mapping[str, Any] = call["function"]
        name, arguments = function["name"], function.get("arguments") or {}
        parsed = dict(json.loads(arguments) if isinstance(arguments, str) else arguments)
        if not isinstance(name, str):
            raise TypeError("the name is not text")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{place}: a tool call cannot be read", got=str(call)[:80], expected='{"function": {"name", "arguments"}}'
        ) from error
    return ToolCall(name=name, arguments=_declared(parsed, name, tools), id=str(call.get("id") or ""))


def _declared(arguments: dict[str, Any], tool: str, tools: Sequence[ToolSchema]) -> dict[str, Any]:
    """Leave out nulls that the tool does not accept: columns of other rows, where data sets were merged."""
    parameters = next((one["function"].get("parameters") for one in tools if one["function"]["name"] == tool), None)
    if not isinstance(parameters, dict):
        return arguments
    properties = parameters.get("properties") or {}
    return {
        name: value
        for name, value in arguments.items()
        if value is not None or (name in properties and _accepts_null(properties[name]))
    }


def _accepts_null(schema: Any) -> bool:
    if not isinstance(schema, dict) or schema.get("nullable"):
        return True
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return any(_accepts_null(choice) for choice in choices)
    kinds = schema.get("type", "null")
    return "null" in (kinds if isinstance(kinds, list) else [kinds])
