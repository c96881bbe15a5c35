"""Tool calls as bare JSON objects that make up the whole answer (Llama 3): ``{"name": …, "parameters": {…}}``."""

from __future__ import annotations

import re

from agentrl.message import ToolCall
from agentrl.render.tool_parsers.contract import Malformed, ParsedCalls, ToolSchemas, make_call
from agentrl.render.tool_parsers.json_value import JsonValue, read_json, skip_space

FORM = 'Answer with {"name": "tool", "parameters": {...}} and nothing else; put ; between several calls.'
_PYTHON_TAG = "<|python_tag|>"
_CALL = re.compile(r'\{\s*"name"\s*:')


def parse(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read an answer that is one call or several with ``;`` between; see `agentrl.render.tool_parsers.contract`."""
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{"):
        stray = _CALL.search(body)
        problems = (f"A tool call stands next to other text. {FORM}",) if stray else ()
        return ParsedCalls(content=body, problems=problems)
    calls: list[ToolCall] = []
    problems_found: list[str] = []
    cursor = 0
    while cursor < len(body):
        number = len(calls) + len(problems_found) + 1
        try:
            value = _read_object(body, cursor, number)
        except Malformed as problem:
            problems_found.append(str(problem))
            break
        cursor = skip_space(body, value.end + 1) if body.startswith(";", value.end) else value.end
        try:
            calls.append(_call(value, tools, number))
        except Malformed as problem:
            problems_found.append(str(problem))
    return ParsedCalls(content="", calls=tuple(calls), problems=tuple(problems_found))


def _read_object(body: str, start: int, number: int) -> JsonValue:
    try:
        value = read_json(body, start, f"Tool call {number}")
    except Malformed as problem:
        raise Malformed(f"{problem} {FORM}") from problem
    if not isinstance(value.value, dict):
        raise Malformed(f"Tool call {number} must be a JSON object, not {type(value.value).__name__}. {FORM}")
    return value


def _call(value: JsonValue, tools: ToolSchemas, number: int) -> ToolCall:
    arguments = value.value.get("parameters", value.value.get("arguments", {}))
    return make_call(value.value.get("name"), arguments, tools, number)
