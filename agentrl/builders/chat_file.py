"""Conversations in a file as trajectories to learn from: what the assistant says there is what a demonstrator did.

A line is ``{"messages": [{"role": "user", "content": "…"}, …], "tools": […]}``, as chat services take and give it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from agentrl.errors import Outcome, UsageError
from agentrl.message import Message, Role, ToolCall
from agentrl.render.check import check_template
from agentrl.render.conversation import LedgerConversation
from agentrl.render.renderer import Renderer
from agentrl.render.tokens import ToolSchema
from agentrl.trajectory import Trajectory

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
    """The conversations of a file of JSON lines.

    Raises:
        UsageError: the file cannot be read, or a line is no conversation with an answer; names the line.
    """
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}", got=error, expected="conversations as JSON lines, in UTF-8") from error
    chats = [_chat(line, f"{file} line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
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
    for message in chat.messages[first:]:
        if message.role == "assistant":
            conversation.demonstrate(renderer.answer_text(message, earlier_calls=calls))
            calls += len(message.tool_calls)
        else:
            conversation.add([message])
    return trajectory


def _chat(line: str, place: str) -> Chat:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place} is not JSON", got=f"{error.msg} at column {error.colno}") from error
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise UsageError(f"{place} is no conversation", got=line[:80], expected='{"messages": [{"role": …}, …]}')
    messages = list(_messages(row["messages"], place))
    while messages and messages[-1].role != "assistant":
        messages.pop()
    _check_answers(messages, place)
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
        raise UsageError(f"{place}: tools are no list of schemas", got=str(tools)[:80], expected='[{"function": {…}}]')
    return Chat(place=place, messages=tuple(messages), tools=tuple(tools))


def _check_answers(messages: Sequence[Message], place: str) -> None:
    answers = [message.role == "assistant" for message in messages]
    if not any(answers):
        raise UsageError(f"{place} has nothing to learn", got="no answer", expected="a message of the role assistant")
    if any(not (one.content or one.tool_calls or one.reasoning) for one in messages if one.role == "assistant"):
        raise UsageError(
            f"{place} has an empty answer", expected="content or tool_calls in each of the assistant's messages"
        )
    if answers[0] or any(one and next_ for one, next_ in pairwise(answers)):
        raise UsageError(f"{place}: an answer answers nothing", expected="a user's or a tool's message before each")


def _messages(rows: Sequence[Any], place: str) -> Iterator[Message]:
    names: dict[str, str] = {}
    for row in rows:
        if not isinstance(row, dict) or row.get("role") not in get_args(Role):
            raise UsageError(f"{place}: a message has no known role", got=str(row)[:80], expected=get_args(Role))
        calls = tuple(_call(call, place) for call in row.get("tool_calls") or ())
        names |= {call.id: call.name for call in calls}
        answered = row.get("tool_call_id")
        yield Message(
            role=row["role"],
            content=_text(row.get("content"), place),
            tool_calls=calls,
            tool_call_id=answered,
            name=(row.get("name") or names.get(answered or "")) if row["role"] == "tool" else None,
            reasoning=row.get("reasoning_content") or row.get("reasoning"),
        )


def _text(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise UsageError(f"{place}: a message is no text", got=str(content)[:80], expected="text, or parts of text")
    return "".join(part["text"] for part in parts)


def _call(call: Any, place: str) -> ToolCall:
    """A tool call, its arguments written as JSON or as an object."""
    try:
        function: Mapping[str, Any] = call["function"]
        arguments = function.get("arguments") or {}
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return ToolCall(name=function["name"], arguments=dict(parsed), id=call.get("id") or "")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{place}: a tool call cannot be read", got=str(call)[:80], expected='{"function": {"name", "arguments"}}'
        ) from error
