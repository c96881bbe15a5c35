"""Tool calls as tags with one tag per argument (Qwen3-Coder): ``<function=name><parameter=key>value</parameter>…``."""

from __future__ import annotations

import re
from typing import Any

from agentrl.message import ToolCall
from agentrl.render.tool_parsers.contract import Malformed, ParsedCalls, ToolSchemas, make_call
from agentrl.render.tool_parsers.typed_value import typed_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = (
    f"Write {OPEN}\n<function=tool>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n{CLOSE}, "
    "with one parameter tag per argument."
)
_FUNCTION = re.compile(r"\s*<function=([^>\s]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]*)>(.*?)</parameter>\s*", re.DOTALL)


def parse(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read every ``<tool_call>`` block; see `agentrl.render.tool_parsers.contract`."""
    content, *blocks = text.split(OPEN)
    remaining = [content]
    calls: list[ToolCall] = []
    problems: list[str] = []
    for number, block in enumerate(blocks, start=1):
        body, closing, after = block.partition(CLOSE)
        remaining.append(after)
        try:
            if not closing:
                raise Malformed(f"Tool call {number} was not closed. {FORM}")
            calls.append(_read_block(body, tools, number))
        except Malformed as problem:
            problems.append(str(problem))
    rest = "".join(remaining)
    if CLOSE in rest or "<function=" in rest:
        problems.append(f"Parts of a tool call stand outside {OPEN} and {CLOSE}. {FORM}")
        rest = rest.replace(CLOSE, "")
    return ParsedCalls(content=rest.strip(), calls=tuple(calls), problems=tuple(problems))


def _read_block(body: str, tools: ToolSchemas, number: int) -> ToolCall:
    function = _FUNCTION.fullmatch(body)
    if function is None:
        raise Malformed(f"Tool call {number} is not one function tag. {FORM}")
    call = make_call(function[1] or None, {}, tools, number)
    arguments = _read_parameters(function[2], call.name, tools, number)
    return make_call(call.name, arguments, tools, number)


def _read_parameters(body: str, name: str, tools: ToolSchemas, number: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    cursor = 0
    while parameter := _PARAMETER.match(body, cursor):
        key, value = parameter[1], parameter[2].removeprefix("\n").removesuffix("\n")
        if key in arguments:
            raise Malformed(f"Tool call {number} gives {key!r} of {name} twice.")
        arguments[key] = typed_value(value, key, name, tools, number)
        cursor = parameter.end()
    if body[cursor:].strip():
        raise Malformed(f"Tool call {number} has text outside its parameter tags. {FORM}")
    return arguments
