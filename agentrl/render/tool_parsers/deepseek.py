"""Tool calls of DeepSeek V3 (name and fenced JSON after a separator) and V3.1 (name, separator, bare JSON).

- Tool calls of Kimi K2: an id that holds the name, ``functions.name:0``, and JSON, each between special tokens.
"""

from __future__ import annotations

import re
from dataclasses import replace

from agentrl.render.tool_parsers import (
    Malformed,
    ParsedCalls,
    ToolSchemas,
    make_call,
)
from agentrl.render.tool_parsers.json_calls import ReadCall, SectionMarks, parse_sections
from agentrl.render.tool_parsers.values import read_json

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_OPEN, SEPARATOR, CALL_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
V31 = SectionMarks(
    open=OPEN,
    close=CLOSE,
    call_open=CALL_OPEN,
    separator=SEPARATOR,
    call_close=CALL_CLOSE,
    form=f"Write {OPEN}{CALL_OPEN}tool{SEPARATOR}{{...}}{CALL_CLOSE}{CLOSE}.",
)
V3 = replace(V31, form=f"Write {OPEN}{CALL_OPEN}function{SEPARATOR}tool\n```json\n{{...}}\n```{CALL_CLOSE}{CLOSE}.")
_FENCE = re.compile(r"([^\n`]*)\n```json\s*")
_FENCE_END = "```"


def parse_v3(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read the calls of DeepSeek V3; see `agentrl.render.tool_parsers`."""

    def read(header: str, start: int, number: int) -> ReadCall:
        fence = _FENCE.match(text, start)
        if fence is None:
            raise Malformed(f"Tool call {number} has no ```json after its name. {V3.form}")
        body = _read_arguments(text, fence.end(), fence[1].strip(), tools, number, V3)
        if not text.startswith(_FENCE_END, body.end):
            raise Malformed(f"The arguments of tool call {number} are not closed with ```. {V3.form}")
        return ReadCall(body.call, body.end + len(_FENCE_END))

    return parse_sections(text, V3, read)


def parse_v31(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read the calls of DeepSeek V3.1; see `agentrl.render.tool_parsers`."""

    def read(header: str, start: int, number: int) -> ReadCall:
        return _read_arguments(text, start, header, tools, number, V31)

    return parse_sections(text, V31, read)


def _read_arguments(text: str, start: int, name: str, tools: ToolSchemas, number: int, marks: SectionMarks) -> ReadCall:
    try:
        body = read_json(text, start, f"The arguments of tool call {number}")
    except Malformed as problem:
        raise Malformed(f"{problem} {marks.form}") from problem
    return ReadCall(make_call(name or None, body.value, tools, number), body.end)


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
_ID = re.compile(r"(?:functions\.)?(?P<name>[\w.\-]+):\d+")


def parse_kimi_k2(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read every call, with the id that the model gave it; see `agentrl.render.tool_parsers`."""
    used: set[str] = set()

    def read(header: str, start: int, number: int) -> ReadCall:
        named = _ID.fullmatch(header)
        if named is None:
            raise Malformed(f"Tool call {number} has the id {header!r}, not one such as functions.tool:0. {MARKS.form}")
        try:
            body = read_json(text, start, f"The arguments of tool call {number}")
        except Malformed as problem:
            raise Malformed(f"{problem} {MARKS.form}") from problem
        call = make_call(named["name"], body.value, tools, number, None if header in used else header)
        used.add(header)
        return ReadCall(call, body.end)

    return parse_sections(text, MARKS, read)
