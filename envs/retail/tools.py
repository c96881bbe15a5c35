"""The desk's methods as tools, and tool calls as text."""

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
"""Name of a call that says its argument ``content`` to the customer, like plain text."""


class DeskTool(Tool):
    """A tool of one desk, which shares its schema and the check of its arguments with `declared`.

    Args:
        declared: The tool with the shared schema.
        target: The desk's method.
    """

    def __init__(self, declared: Tool, target: Callable[..., str]) -> None:
        super().__init__(target, name=declared.name, inline=True)
        self._declared = declared

    @functools.cached_property
    def schema(self) -> dict[str, Any]:
        """Schema of the declared tool."""
        return self._declared.schema

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Check arguments with the declared tool.

        Raises:
            ToolError: an argument is missing, unknown or of the wrong type.
        """
        return self._declared.validate(arguments)


class Toolbox:
    """A desk with its tools, for one episode after another; each episode sets the desk's database."""

    def __init__(self) -> None:
        self.desk = _empty_desk()
        self.tools = tuple(DeskTool(tool, getattr(self.desk, name)) for name, tool in declared_tools().items())
        self._named = {tool.name: tool for tool in self.tools}

    def call(self, call: ToolCall) -> str:
        """Execute a call and return its result.

        Raises:
            ToolError: the tool is unknown, its arguments are wrong, or the desk refuses.
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
    """Return all tools by name, bound to a desk without records."""
    desk = _empty_desk()
    names = [name for name in vars(Desk) if not name.startswith("_")]
    return {name: Tool(getattr(desk, name), inline=True) for name in names}


def describe_tools() -> str:
    """Return a line per tool, with its arguments and summary, for agents that write their calls as text."""
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
    """Return the call in an action's text; ``None`` if the text is for the customer.

    Raises:
        ToolError: the text looks like a call but is not valid.
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
    """Return the assistant message of a text action: a call, or text (also for an invalid call)."""
    with contextlib.suppress(ToolError):
        if (call := parse_call(action)) is not None:
            return Message(role="assistant", tool_calls=(call,))
    return Message(role="assistant", content=action)


_EXAMPLE = call_text("think", {"thought": "What do I know?"})
