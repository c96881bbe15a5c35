"""Tool calls of Kimi K2: an id that holds the name, ``functions.name:0``, and JSON, each between special tokens."""

from __future__ import annotations

import re

from agentrl.render.tool_parsers.contract import Malformed, ParsedCalls, ToolSchemas, make_call
from agentrl.render.tool_parsers.json_value import read_json
from agentrl.render.tool_parsers.sections import ReadCall, SectionMarks, parse_sections

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


def parse(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read every call, with the id that the model gave it; see `agentrl.render.tool_parsers.contract`."""
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
