"""Tool calls as text, and the methods of a desk as tools."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from agentrl.errors import ToolError
from agentrl.message import Message, ToolCall
from agentrl.tool import Tool, ToolResult

RESPOND = "respond"
"""Name of a call that says its argument ``content`` to the customer, like plain text."""


class DeskTool(Tool):
    """A tool of one desk, which shares its schema and the check of its arguments with `declared`.

    Args:
        declared: The tool with the shared schema.
        target: The desk's method.
    """

    def __init__(self, declared: Tool, target: Callable[..., str | ToolResult]) -> None:
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


def read_action(action: str) -> ToolCall | str:
    """Return the tool call in an action's text, or else the words for the customer.

    Raises:
        ToolError: the text looks like a call but is not valid.
    """
    call = parse_call(action)
    if call is None:
        return action
    return str(call.arguments.get("content", "")) if call.name == RESPOND else call


def tool_message(action: str) -> Message:
    """Return the assistant message of a text action: a call, or text (also for an invalid call)."""
    with contextlib.suppress(ToolError):
        if (call := parse_call(action)) is not None:
            return Message(role="assistant", tool_calls=(call,))
    return Message(role="assistant", content=action)


_EXAMPLE = call_text("think", {"thought": "What do I know?"})
