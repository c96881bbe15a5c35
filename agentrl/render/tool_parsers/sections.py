"""Notations that put all calls of an answer into one section, each between marks with its JSON after a separator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentrl.message import ToolCall
from agentrl.render.tool_parsers.collected import Collected
from agentrl.render.tool_parsers.contract import Malformed, ParsedCalls
from agentrl.render.tool_parsers.json_value import skip_space


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionMarks:
    """The marks of a notation, and how to write it."""

    open: str
    close: str
    call_open: str
    separator: str
    call_close: str
    form: str
    """A sentence for the model."""


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A call, and the index after its body."""

    call: ToolCall
    end: int


BodyReader = Callable[[str, int, int], ReadCall]
"""From what stands before the separator, the index after it, and the call's number; raises `Malformed`."""


def parse_sections(text: str, marks: SectionMarks, read_body: BodyReader) -> ParsedCalls:
    """Read every section; see `agentrl.render.tool_parsers.contract`."""
    found = Collected()
    cursor = 0
    while (start := text.find(marks.open, cursor)) >= 0:
        found.content.append(text[cursor:start])
        cursor = _read_section(text, start + len(marks.open), marks, read_body, found)
    found.content.append(text[cursor:])
    stray = [mark for mark in (marks.call_open, marks.call_close, marks.close) if mark in found.content[-1]]
    if stray:
        found.problems.append(f"{stray[0]} stands without {marks.open} before it. {marks.form}")
        for mark in stray:
            found.content[-1] = found.content[-1].replace(mark, "")
    return found.result()


def _read_section(text: str, start: int, marks: SectionMarks, read_body: BodyReader, found: Collected) -> int:
    """Collect the calls of a section; the index after it."""
    cursor, before = skip_space(text, start), len(found.calls) + len(found.problems)
    while text.startswith(marks.call_open, cursor):
        cursor = _read_call(text, cursor + len(marks.call_open), marks, read_body, found)
    if text.startswith(marks.close, cursor):
        if len(found.calls) + len(found.problems) == before:
            found.problems.append(f"The section of tool calls holds no call. {marks.form}")
        return cursor + len(marks.close)
    found.problems.append(f"The section of tool calls was not closed with {marks.close}. {marks.form}")
    close = text.find(marks.close, cursor)
    return len(text) if close < 0 else close + len(marks.close)


def _read_call(text: str, start: int, marks: SectionMarks, read_body: BodyReader, found: Collected) -> int:
    """Collect one call; the index of what follows it."""
    number, end = found.number, start

    def read() -> ToolCall:
        nonlocal end
        separator = text.find(marks.separator, start)
        if separator < 0 or marks.call_close in text[start:separator]:
            raise Malformed(f"Tool call {number} has no {marks.separator}. {marks.form}")
        body = read_body(text[start:separator].strip(), separator + len(marks.separator), number)
        end = skip_space(text, body.end)
        if not text.startswith(marks.call_close, end):
            extra = "was not closed" if end == len(text) else "goes on after its arguments"
            raise Malformed(f"Tool call {number} {extra}. {marks.form}")
        end += len(marks.call_close)
        return body.call

    if found.take(read):
        return skip_space(text, end)
    return _resume(text, end, marks)


def _resume(text: str, start: int, marks: SectionMarks) -> int:
    """Where reading goes on after a malformed call: the next call, or the end of the section."""
    places = [place for mark in (marks.call_open, marks.close) if (place := text.find(mark, start)) >= 0]
    return min(places, default=len(text))
