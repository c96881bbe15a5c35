"""The contract of a tool-call parser.

A parser is a function of the answer's text, thinking removed, and the offered tools by name. It never raises: what it
cannot use becomes a problem, a sentence that the model can act on.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from agentrl.message import ToolCall

ToolSchemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Offered tools by name, as chat templates read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCalls:
    """What a parser found."""

    content: str
    """The text around the calls."""
    calls: tuple[ToolCall, ...] = ()
    """The calls that can be made, in order, with ids that tell them apart within the answer."""
    problems: tuple[str, ...] = ()
    """What was wrong with the others."""


class ToolParser(Protocol):
    """Reads the calls in an answer's text."""

    def __call__(self, text: str, tools: ToolSchemas) -> ParsedCalls:
        """Calls, problems and the remaining text; never raises."""


class Malformed(Exception):
    """A call that cannot be used; its message is a problem for the model. Raised and caught inside parsers."""


def make_call(name: object, arguments: object, tools: ToolSchemas, number: int, call_id: str | None = None) -> ToolCall:
    """A call of a known tool with an object of arguments.

    Args:
        name: As the model wrote it.
        arguments: As the model wrote them.
        tools: The offered tools.
        number: Of the call within the answer, from 1 on.
        call_id: The id that the model gave the call, where its notation has ids.

    Raises:
        Malformed: says what is missing, unknown or of a wrong type.
    """
    if name is None:
        raise Malformed(f'Tool call {number} has no "name". Offered tools: {", ".join(tools)}.')
    if not isinstance(name, str):
        raise Malformed(f'The "name" of tool call {number} must be a string, not {type(name).__name__}.')
    if name not in tools:
        near = difflib.get_close_matches(name, tools, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Offered tools: {', '.join(tools)}."
        raise Malformed(f"Tool call {number} names an unknown tool {name!r}. {hint}")
    if not isinstance(arguments, Mapping):
        raise Malformed(
            f"The arguments of {name} (tool call {number}) must be a JSON object, not {type(arguments).__name__}."
        )
    return ToolCall(name=name, arguments=dict(arguments), id=call_id or f"call_{number}")
