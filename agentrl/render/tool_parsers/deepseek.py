"""Tool calls in a section with marks around each call: DeepSeek V3 and V3.1, and Kimi K2."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from agentrl.message import ToolCall
from agentrl.render.tool_parsers import (
    CollectedCalls,
    MalformedCall,
    ParsedCalls,
    ToolSchemas,
    collect_blocks,
    make_call,
)
from agentrl.render.tool_parsers.tolerant_tags import DAMAGED, fitting_call
from agentrl.render.tool_parsers.untagged import NO_ARGUMENTS, parse_or_read_untagged
from agentrl.render.tool_parsers.values import first_of, read_json, skip_space

_BARE = re.compile(r"([^<{\n]*+)(?:<[^<>{]*+>)?\s*+(?=\{)")
"""Pattern of a name, and possibly a damaged separator, before the arguments of a call."""
OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_OPEN, SEPARATOR, CALL_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = re.compile(r"([^\n`]*)\n```json\s*")
_FENCE_END = "```"
_ID = re.compile(r"(?:functions\.)?(?P<name>[\w.\-]+):\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionMarks:
    """Marks of a notation, and a description of the notation."""

    open: str
    close: str
    call_open: str
    separator: str
    call_close: str
    form: str
    """Sentence that shows the model how to write calls."""

    @property
    def all(self) -> tuple[str, ...]:
        """All marks."""
        return (self.open, self.close, self.call_open, self.separator, self.call_close)


@dataclass(frozen=True, slots=True)
class ReadCall:
    """Call with the index after its body."""

    call: ToolCall
    end: int
    slips: tuple[str, ...] = ()


BodyReader = Callable[[str, int, int], ReadCall]
"""Function of the text before the separator, the index after it, and the call's number; raises `MalformedCall`."""


def parse_sections(text: str, marks: SectionMarks, read_body: BodyReader) -> ParsedCalls:
    """Read every section; see `agentrl.render.tool_parsers`."""
    found = collect_blocks(text, marks.open, partial(_read_section, text, marks, read_body))
    found.refuse_stray((marks.call_open, marks.call_close, marks.close), marks.open, marks.form)
    strict = found.result()
    if not strict.problems:
        return strict
    found = collect_blocks(text, marks.call_open, partial(_read_lone_call, text, marks, read_body))
    found.content = [
        functools.reduce(lambda piece, mark: piece.replace(mark, ""), marks.all, piece) for piece in found.content[:1]
    ]
    return found.result() if len(found.calls) > len(strict.calls) else strict


def _read_lone_call(text: str, marks: SectionMarks, read_body: BodyReader, start: int, found: CollectedCalls) -> int:
    """Collect a call regardless of the text around it, as servers do; return the index after it."""
    while text.startswith(marks.call_open, start):
        start += len(marks.call_open)
    before = len(found.calls)
    end = _read_call(text, start, marks, read_body, found, strict=False)
    if len(found.calls) > before:
        found.note([DAMAGED])
    return max(end, start)


def _read_section(text: str, marks: SectionMarks, read_body: BodyReader, start: int, found: CollectedCalls) -> int:
    cursor, before = skip_space(text, start), found.number
    while text.startswith(marks.call_open, cursor):
        cursor = _read_call(text, cursor + len(marks.call_open), marks, read_body, found)
    if text.startswith(marks.close, cursor):
        if found.number == before:
            found.problems.append(f"The section of tool calls contains no call. {marks.form}")
        return cursor + len(marks.close)
    found.problems.append(f"The section of tool calls was not closed with {marks.close}. {marks.form}")
    return min(first_of(text, [marks.close], cursor) + len(marks.close), len(text))


def _read_call(
    text: str, start: int, marks: SectionMarks, read_body: BodyReader, found: CollectedCalls, *, strict: bool = True
) -> int:
    """Collect one call and return the index after it; unless `strict`, the end of the text may end the call."""
    number, end = found.number, start
    slips: tuple[str, ...] = ()

    def read() -> ToolCall:
        nonlocal end, slips
        separator = text.find(marks.separator, start)
        is_missing = separator < 0 or marks.call_close in text[start:separator]
        if is_missing and not strict and (bare := _BARE.match(text, start)):
            body = read_body(bare[1].strip(), bare.end(), number)
            end = skip_space(text, body.end)
            return body.call
        if is_missing:
            raise MalformedCall(f"Tool call {number} has no {marks.separator}. {marks.form}")
        begin = separator + len(marks.separator)
        while text.startswith(marks.separator, begin):
            begin += len(marks.separator)
        body = read_body(text[start:separator].strip(), begin, number)
        end, slips = skip_space(text, body.end), body.slips
        if not text.startswith(marks.call_close, end) and (end < len(text) or strict):
            extra = "was not closed" if end == len(text) else "continues after its arguments"
            raise MalformedCall(f"Tool call {number} {extra}. {marks.form}")
        end = min(end + len(marks.call_close), len(text))
        return body.call

    if not found.take(read):
        return first_of(text, (marks.call_open, marks.close), end)
    if strict:
        found.note(slips)
    return skip_space(text, end)


V31 = SectionMarks(
    open=OPEN,
    close=CLOSE,
    call_open=CALL_OPEN,
    separator=SEPARATOR,
    call_close=CALL_CLOSE,
    form=f"Write {OPEN}{CALL_OPEN}tool{SEPARATOR}{{...}}{CALL_CLOSE}{CLOSE}.",
)
V3 = replace(V31, form=f"Write {OPEN}{CALL_OPEN}function{SEPARATOR}tool\n```json\n{{...}}\n```{CALL_CLOSE}{CLOSE}.")


def parse_v3(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read the calls of DeepSeek V3; see `agentrl.render.tool_parsers`."""

    def read(header: str, start: int, number: int) -> ReadCall:
        fence = _FENCE.match(text, start)
        if fence is None:
            raise MalformedCall(f"Tool call {number} has no ```json after its name. {V3.form}")
        body = _read_arguments(text, fence.end(), fence[1].strip(), tools, number, V3)
        if not text.startswith(_FENCE_END, body.end):
            raise MalformedCall(f"The arguments of tool call {number} are not closed with ```. {V3.form}")
        return replace(body, end=body.end + len(_FENCE_END))

    return parse_sections(text, V3, read)


repair_v3 = partial(parse_or_read_untagged, parse_v3, V3.form)


def parse_v31(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read the calls of DeepSeek V3.1; see `agentrl.render.tool_parsers`."""

    def read(header: str, start: int, number: int) -> ReadCall:
        return _read_arguments(text, start, header, tools, number, V31)

    return parse_sections(text, V31, read)


repair_v31 = partial(parse_or_read_untagged, parse_v31, V31.form)


def _read_arguments(
    text: str, start: int, name: str, tools: ToolSchemas, number: int, marks: SectionMarks, call_id: str | None = None
) -> ReadCall:
    if name in tools and text.startswith((marks.call_close, _FENCE_END), begin := skip_space(text, start)):
        return ReadCall(fitting_call(name, {}, tools, number, call_id), begin, (NO_ARGUMENTS,))
    body = read_json(text, start, f"The arguments of tool call {number}", marks.form)
    if name in tools and body.value is None:
        return ReadCall(fitting_call(name, {}, tools, number, call_id), body.end, (NO_ARGUMENTS,))
    return ReadCall(make_call(name or None, body.value, tools, number, call_id), body.end)


MARKS = SectionMarks(
    open="<|tool_calls_section_begin|>",
    close="<|tool_calls_section_end|>",
    call_open="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_close="<|tool_call_end|>",
    form=(
        "Write <|tool_calls_section_begin|><|tool_call_begin|>functions.tool:0<|tool_call_argument_begin|>{...}"
        "<|tool_call_end|><|tool_calls_section_end|>, and count the calls."
    ),
)


def parse_kimi_k2(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read every call, with the id that the model gave it; see `agentrl.render.tool_parsers`."""
    used: set[str] = set()

    def read(header: str, start: int, number: int) -> ReadCall:
        named = _ID.fullmatch(header)
        if named is None:
            raise MalformedCall(
                f"Tool call {number} has the id {header!r}, not one such as functions.tool:0. {MARKS.form}"
            )
        found = _read_arguments(text, start, named["name"], tools, number, MARKS, None if header in used else header)
        used.add(header)
        return found

    return parse_sections(text, MARKS, read)


repair_kimi_k2 = partial(parse_or_read_untagged, parse_kimi_k2, MARKS.form)
