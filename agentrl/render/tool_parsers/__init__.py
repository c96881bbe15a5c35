"""Parsers of tool calls: one module per notation, each a function from text to calls and problems."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from agentrl.json_schema import as_mapping
from agentrl.message import ToolCall

ToolSchemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Offered tools by name, as chat templates read them."""


def parameters_of(name: str, tools: ToolSchemas) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments; an empty one where the tool declares none."""
    function = as_mapping(as_mapping(tools.get(name)).get("function"))
    return as_mapping(function.get("parameters"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCalls:
    """What a parser found."""

    content: str
    """The text around the calls."""
    calls: tuple[ToolCall, ...] = ()
    """The calls that can be made, in order, with ids that tell them apart within the answer."""
    problems: tuple[str, ...] = ()
    """What was wrong with the others."""
    repairs: tuple[str, ...] = ()
    """For each call that is not in the model's own notation, how it differs from it."""


UNCLOSED_TAG, LISTED, PARAMETERS = "no closing tag", "a list of calls", '"parameters" for "arguments"'
"""Slips that inference servers accept."""


class ToolParser(Protocol):
    """Reads the calls in an answer's text."""

    def __call__(self, text: str, tools: ToolSchemas) -> ParsedCalls:
        """Calls, problems and the remaining text; never raises."""


class CallRepair(Protocol):
    """A reader of the calls in an answer's text, including those that are not quite in the model's notation."""

    def __call__(self, text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
        """Calls, problems and the remaining text; never raises. `is_whole`: the answer was not cut."""


class Malformed(Exception):
    """A call that cannot be used; its message is a problem for the model. Raised and caught inside parsers."""


def make_call(name: object, arguments: object, tools: ToolSchemas, number: int, call_id: str | None = None) -> ToolCall:
    """Return a call of a known tool with an object of arguments.

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


_FENCE = re.compile(r"^[ \t]*```(?P<language>[^\n]*)$", re.MULTILINE)


def shows_example(text: str, mark: str) -> bool:
    """Return True if `mark` occurs only in closed code blocks that text follows: the answer explains the notation."""
    outside: list[str] = []
    opened, cursor = -1, 0
    for fence in _FENCE.finditer(text):
        if opened < 0:
            opened = fence.start()
        elif not fence["language"].strip():
            outside.append(text[cursor:opened])
            opened, cursor = -1, fence.end()
    rest = text[cursor:]
    return bool(outside) and mark in text and mark not in "".join([*outside, rest]) and bool(rest.strip())


@dataclass(slots=True)
class Collected:
    """Content, calls and problems, in order."""

    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The number of the call that is read next, from 1 on; malformed ones count."""
        return len(self.calls) + len(self.problems) + 1

    def take(self, read: Callable[[], ToolCall]) -> bool:
        """Keep a call, or the problem with it; whether it was a call."""
        try:
            self.calls.append(read())
        except Malformed as problem:
            self.problems.append(str(problem))
            return False
        return True

    def note(self, slips: Sequence[str]) -> None:
        """Record how the call that was taken last differs from the model's notation, if it does."""
        if slips:
            self.repairs.append(", ".join(dict.fromkeys(slips)))

    def refuse_stray(self, marks: Sequence[str], opening: str, form: str) -> None:
        """Report marks that stand in the text after the last block, and take them out."""
        stray = [mark for mark in marks if mark in self.content[-1]]
        if stray:
            self.problems.append(f"{stray[0]} stands without {opening} before it. {form}")
        for mark in stray:
            self.content[-1] = self.content[-1].replace(mark, "")

    def result(self) -> ParsedCalls:
        """Return all of it."""
        return ParsedCalls(
            content="".join(self.content).strip(),
            calls=tuple(self.calls),
            problems=tuple(self.problems),
            repairs=tuple(self.repairs),
        )


def collect_blocks(text: str, opening: str, read: Callable[[int, Collected], int]) -> Collected:
    """Collect the blocks that `opening` begins, and the text between them.

    Args:
        text: The answer.
        opening: The mark that begins a block.
        read: Collects the calls of the block whose body begins at an index; returns the index after the block.
    """
    found, cursor = Collected(), 0
    while (start := text.find(opening, cursor)) >= 0:
        found.content.append(text[cursor:start])
        cursor = read(start + len(opening), found)
    found.content.append(text[cursor:])
    return found
