"""Tool calls of GLM 4.5 to 4.7: a name, then a tag for each argument's key and one for its value."""

from __future__ import annotations

import re
from typing import Any

from agentrl.message import ToolCall
from agentrl.render.tool_parsers.collected import Collected
from agentrl.render.tool_parsers.contract import Malformed, ParsedCalls, ToolSchemas, make_call
from agentrl.render.tool_parsers.json_value import skip_space
from agentrl.render.tool_parsers.typed_value import typed_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = f"Write {OPEN}tool\n<arg_key>argument</arg_key>\n<arg_value>value</arg_value>\n{CLOSE}."
_NAME = re.compile(r"\s*([^<\n]*)")
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def parse(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read every ``<tool_call>`` block; see `agentrl.render.tool_parsers.contract`."""
    found = Collected()
    cursor = 0
    while (start := text.find(OPEN, cursor)) >= 0:
        found.content.append(text[cursor:start])
        cursor = _read_block(text, start + len(OPEN), tools, found)
    found.content.append(text[cursor:])
    if CLOSE in found.content[-1]:
        found.problems.append(f"{CLOSE} stands without {OPEN} before it. {FORM}")
        found.content[-1] = found.content[-1].replace(CLOSE, "")
    return found.result()


def _read_block(text: str, start: int, tools: ToolSchemas, found: Collected) -> int:
    """Collect the call of a block; the index after it."""
    number, end = found.number, start

    def read() -> ToolCall:
        nonlocal end
        head = _NAME.match(text, start)
        arguments: dict[str, str] = {}
        end = start if head is None else head.end()
        while argument := _ARGUMENT.match(text, end):
            key, end = argument[1].strip(), argument.end()
            if key in arguments:
                raise Malformed(f"Tool call {number} gives {key!r} twice.")
            arguments[key] = argument[2]
        end = skip_space(text, end)
        if not text.startswith(CLOSE, end):
            extra = "was not closed" if end == len(text) else "has text outside its argument tags"
            raise Malformed(f"Tool call {number} {extra}. {FORM}")
        return _call(head[1].strip() if head else "", arguments, tools, number)

    found.take(read)
    close, following = text.find(CLOSE, end), text.find(OPEN, end)
    if close >= 0 and (following < 0 or close < following):
        return close + len(CLOSE)
    return following if following >= 0 else len(text)


def _call(name: str, written: dict[str, str], tools: ToolSchemas, number: int) -> ToolCall:
    call = make_call(name or None, {}, tools, number)
    arguments: dict[str, Any] = {
        key: typed_value(value, key, call.name, tools, number) for key, value in written.items()
    }
    return make_call(call.name, arguments, tools, number)
