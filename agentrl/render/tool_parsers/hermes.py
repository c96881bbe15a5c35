"""Tool calls as JSON between ``<tool_call>`` and ``</tool_call>`` (Hermes, Qwen2.5, Qwen3)."""

from __future__ import annotations

from agentrl.message import ToolCall
from agentrl.render.tool_parsers.contract import Malformed, ParsedCalls, ToolSchemas, make_call
from agentrl.render.tool_parsers.json_value import read_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = f'Write {OPEN}\n{{"name": "tool", "arguments": {{...}}}}\n{CLOSE}.'


def parse(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read every ``<tool_call>`` block; see `agentrl.render.tool_parsers.contract`."""
    content: list[str] = []
    calls: list[ToolCall] = []
    problems: list[str] = []
    cursor = 0
    while (start := text.find(OPEN, cursor)) >= 0:
        content.append(text[cursor:start])
        number = len(calls) + len(problems) + 1
        try:
            calls.append(_read_block(text, start + len(OPEN), tools, number))
        except Malformed as problem:
            problems.append(str(problem))
        cursor = _block_end(text, start + len(OPEN))
    content.append(text[cursor:])
    remaining = "".join(content)
    if CLOSE in remaining:
        problems.append(f"{CLOSE} stands without {OPEN} before it. {FORM}")
        remaining = remaining.replace(CLOSE, "")
    return ParsedCalls(content=remaining.strip(), calls=tuple(calls), problems=tuple(problems))


def _read_block(text: str, start: int, tools: ToolSchemas, number: int) -> ToolCall:
    try:
        body = read_json(text, start, f"Tool call {number}")
    except Malformed as problem:
        raise Malformed(f"{problem} {FORM}") from problem
    if not text.startswith(CLOSE, body.end):
        extra = "was not closed" if body.end == len(text) else "goes on after its JSON object"
        raise Malformed(f"Tool call {number} {extra}. {FORM}")
    if not isinstance(body.value, dict):
        raise Malformed(f"Tool call {number} must be a JSON object, not {type(body.value).__name__}. {FORM}")
    return make_call(body.value.get("name"), body.value.get("arguments", {}), tools, number)


def _block_end(text: str, start: int) -> int:
    """Index after a block: past its JSON and closing tag, or where the next block opens when it is not closed."""
    try:
        inside = read_json(text, start, "").end
    except Malformed:
        inside = start
    close, following = text.find(CLOSE, inside), text.find(OPEN, inside)
    if close >= 0 and (following < 0 or close < following):
        return close + len(CLOSE)
    return following if following >= 0 else len(text)
