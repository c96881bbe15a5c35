"""Tolerant parser of calls with missing, doubled or misspelled tags, which reads them as inference servers do.

A call ends at its closing tag, at the next call, or at the end of the text; an argument ends in the same way within its
call. Text outside the tags of arguments is ignored. A call counts only if its arguments fit the tool's schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from agentrl.message import ToolCall
from agentrl.render.tool_parsers import (
    CollectedCalls,
    MalformedCall,
    ParsedCalls,
    ToolSchemas,
    make_call,
    parameters_of,
)
from agentrl.render.tool_parsers.values import first_of
from agentrl.tool.json_schema import fits, misfits

DAMAGED = "damaged tags"
_TWICE = re.compile(r"(<[^<>]+>)\s*\1")
_BROKEN_END = re.compile(r"</[^<>]*>?\Z")
ValueReader: TypeAlias = Callable[[re.Match[str], str, str, int], Any]
"""Function of an argument's opening, its text, the tool's name and the call's number; raises `MalformedCall`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """Tags of a notation."""

    call: re.Pattern[str]
    """Opening of a call; its first group is the name."""
    ends: tuple[str, ...]
    """Marks that end a call."""
    argument: re.Pattern[str]
    """Opening of an argument; its first group is the key."""
    argument_end: str
    marks: re.Pattern[str]
    """Marks that are not part of the content."""


def with_tolerant_fallback(
    strict: ParsedCalls, tags: CallTags, text: str, tools: ToolSchemas, read: ValueReader
) -> ParsedCalls:
    """Return the result of the strict parser, or that of the tolerant parser if it finds more calls.

    `read` reads the value of an argument.
    """
    if not strict.problems:
        return strict
    found = CollectedCalls()
    text = _TWICE.sub(r"\1", text)
    openings = list(tags.call.finditer(text))
    found.content.append(text[: openings[0].start()] if openings else text)
    for index, opening in enumerate(openings):
        following = openings[index + 1].start() if index + 1 < len(openings) else len(text)
        end = min(first_of(text, tags.ends, opening.end()), following)
        is_last = end == len(text)
        if found.take(partial(_call, text[opening.end() : end], opening[1], tags, tools, found.number, read, is_last)):
            found.note([DAMAGED])
        found.content.append(text[end:following])
    found.content = [tags.marks.sub("", piece) for piece in found.content]
    tolerant = found.result()
    return tolerant if len(tolerant.calls) > len(strict.calls) else strict


def _call(
    body: str, name: str, tags: CallTags, tools: ToolSchemas, number: int, read: ValueReader, is_last: bool
) -> ToolCall:
    made = make_call(name.strip() or None, {}, tools, number)
    arguments: dict[str, Any] = {}
    after = 0
    openings = list(tags.argument.finditer(body))
    for index, opening in enumerate(openings):
        following = openings[index + 1].start() if index + 1 < len(openings) else len(body)
        end = body.find(tags.argument_end, opening.end(), following)
        if end < 0 and following == len(body) and is_last:
            raise MalformedCall(f"Tool call {number} ends within an argument.")
        key = opening[1].strip()
        if key in arguments:
            raise MalformedCall(f"Tool call {number} gives {key!r} of {name} twice.")
        written = body[opening.end() : end if end >= 0 else following]
        after = end + len(tags.argument_end) if end >= 0 else following
        if end < 0:
            written = _BROKEN_END.sub("", written.rstrip()).rstrip()
        arguments[key] = read(opening, written, made.name, number)
    rest = body[after:].strip()
    if is_last and rest and not any(mark.startswith(rest) for mark in tags.ends):
        raise MalformedCall(f"Tool call {number} ends within a tag.")
    return fitting_call(made.name, arguments, tools, number)


def fitting_call(
    name: str, arguments: Mapping[str, Any], tools: ToolSchemas, number: int, call_id: str | None = None
) -> ToolCall:
    """Make a call whose arguments fit the tool's schema.

    Raises:
        MalformedCall: the arguments do not fit.
    """
    made = make_call(name, arguments, tools, number, call_id)
    root = parameters_of(name, tools)
    if not fits(dict(made.arguments), root, root):
        reason = misfits(made.arguments, root)
        raise MalformedCall(
            f"The arguments of {name} (tool call {number}) do not fit the tool's schema{reason and f': {reason}'}."
        )
    return made
