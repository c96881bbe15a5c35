"""The desk's methods as tools, and calls of them as text."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from agentrl.errors import ToolError
from agentrl.message import Message, ToolCall
from agentrl.tool import Tool

from .database import Database, Store
from .desk import Desk

RESPOND = "respond"
"""A call of this name says its argument ``content`` to the customer, as plain text does."""


class DeskTool(Tool):
    """A tool of one desk. What the tools of a name share (schema, check of arguments) is made once, by `declared`.

    Args:
        declared: The tool that describes it.
        target: The desk's method.
    """

    def __init__(self, declared: Tool, target: Callable[..., str]) -> None:
        super().__init__(target, name=declared.name, inline=True)
        self._declared = declared

    @functools.cached_property
    def schema(self) -> dict[str, Any]:
        """As declared."""
        return self._declared.schema

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """As declared.

        Raises:
            ToolError: an argument is missing, unknown or of another type.
        """
        return self._declared.validate(arguments)


class Toolbox:
    """A desk with its tools, for one episode after another; each gives it a database."""

    def __init__(self) -> None:
        self.desk = _empty_desk()
        self.tools = tuple(DeskTool(tool, getattr(self.desk, name)) for name, tool in declared_tools().items())
        self._named = {tool.name: tool for tool in self.tools}

    def call(self, call: ToolCall) -> str:
        """What a call that was written as text answers.

        Raises:
            ToolError: there is no such tool, its arguments are wrong, or the desk refuses.
        """
        tool = self._named.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}", expected=", ".join(self._named))
        text: str = tool(**tool.validate(call.arguments))
        return text


def _empty_desk() -> Desk:
    return Desk(Database(Store(users={}, products={}, orders={})))


@functools.cache
def declared_tools() -> dict[str, Tool]:
    """All tools by name, bound to a desk without records."""
    desk = _empty_desk()
    names = [name for name in vars(Desk) if not name.startswith("_")]
    return {name: Tool(getattr(desk, name), inline=True) for name in names}


def describe_tools() -> str:
    """Return a line per tool, with its arguments and what it does, for agents that write their calls as text."""
    lines = []
    for name, declared in declared_tools().items():
        signature = str(inspect.signature(declared.target)).partition(" ->")[0].replace("'", "")
        summary = " ".join((inspect.getdoc(declared.target) or "").partition("\n\n")[0].split())
        lines.append(f"- {name}{signature}: {summary}")
    return "\n".join(lines)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as the text of an action.

    >>> call_text("think", {"thought": "Hm."})
    '{"name": "think", "arguments": {"thought": "Hm."}}'
    """
    written = ", ".join(f"{_json(key)}: {_json(value)}" for key, value in arguments.items())
    return f'{{"name": {_json(name)}, "arguments": {{{written}}}}}'


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def parse_call(action: str) -> ToolCall | None:
    """Return the call that an action's text makes; ``None`` when it is said to the customer.

    Raises:
        ToolError: it looks like a call and is none.
    """
    text = action.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    if not text.startswith("{"):
        return None
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ToolError("this call is not JSON", got=error, expected=_EXAMPLE) from error
    arguments = call.get("arguments", {})
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        raise ToolError("this is not a tool call", got=", ".join(call), expected=_EXAMPLE)
    return ToolCall(name=call["name"], arguments=arguments)


def tool_message(action: str) -> Message:
    """Return the assistant message that takes a text action: a call, or words (a broken call is those, too)."""
    with contextlib.suppress(ToolError):
        if (call := parse_call(action)) is not None:
            return Message(role="assistant", tool_calls=(call,))
    return Message(role="assistant", content=action)


_EXAMPLE = call_text("think", {"thought": "What do I know?"})
