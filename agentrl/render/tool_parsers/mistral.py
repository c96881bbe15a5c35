"""Tool calls of Mistral after ``[TOOL_CALLS]``: a JSON array (to version 7), or ``name[ARGS]{…}`` (from 11 on)."""

from __future__ import annotations

import re
from functools import partial

from agentrl.message import ToolCall
from agentrl.render.tool_parsers.collected import Collected
from agentrl.render.tool_parsers.contract import Malformed, ParsedCalls, ToolSchemas, make_call
from agentrl.render.tool_parsers.json_value import read_json, skip_space

OPEN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
FORM = f"Write {OPEN}tool{ARGUMENTS}{{...}} for each call."
ARRAY_FORM = f'Write {OPEN} [{{"name": "tool", "arguments": {{...}}}}] with all calls.'
_ID = re.compile(r"[A-Za-z0-9]{9}")
_HEAD = re.compile(r"\s*(?P<name>[^\s\[\]{}]*)\s*(?:\[CALL_ID\](?P<id>[A-Za-z0-9]*)\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def parse(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read what follows every ``[TOOL_CALLS]``; see `agentrl.render.tool_parsers.contract`."""
    found = Collected()
    cursor = 0
    while (start := text.find(OPEN, cursor)) >= 0:
        found.content.append(text[cursor:start])
        begin = skip_space(text, start + len(OPEN))
        read = _read_array if text.startswith(("[", "{"), begin) else _read_call
        cursor = read(text, begin, tools, found)
    found.content.append(text[cursor:])
    return found.result()


def _read_array(text: str, start: int, tools: ToolSchemas, found: Collected) -> int:
    """Collect the calls of an array, or of a lone object; the index after it."""
    try:
        array = read_json(text, start, "The array of tool calls")
    except Malformed as problem:
        found.problems.append(f"{problem} {ARRAY_FORM}")
        return _next_mark(text, start)
    for item in array.value if isinstance(array.value, list) else [array.value]:
        found.take(partial(_call_of, item, tools, found))
    if array.value == []:
        found.problems.append(f"The array of tool calls is empty. {ARRAY_FORM}")
    return array.end


def _call_of(item: object, tools: ToolSchemas, found: Collected) -> ToolCall:
    number = found.number
    if not isinstance(item, dict):
        raise Malformed(f"Tool call {number} must be a JSON object, not {type(item).__name__}. {ARRAY_FORM}")
    return make_call(item.get("name"), item.get("arguments", {}), tools, number, _call_id(item.get("id"), found))


def _read_call(text: str, start: int, tools: ToolSchemas, found: Collected) -> int:
    """Collect a call that begins with its name; the index after it."""
    number, end = found.number, start

    def read() -> ToolCall:
        nonlocal end
        head = _HEAD.match(text, start)
        if head is None:
            raise Malformed(f"Tool call {number} is not a name with {ARGUMENTS} and a JSON object after it. {FORM}")
        try:
            body = read_json(text, head.end(), f"The arguments of tool call {number}")
        except Malformed as problem:
            raise Malformed(f"{problem} {FORM}") from problem
        end = body.end
        return make_call(head["name"] or None, body.value, tools, number, _call_id(head["id"], found))

    return end if found.take(read) or end > start else _next_mark(text, start)


def _call_id(written: object, found: Collected) -> str:
    """The id that the model wrote, if it is one; else nine letters and digits, as Mistral's templates ask for."""
    if isinstance(written, str) and _ID.fullmatch(written) and all(call.id != written for call in found.calls):
        return written
    return f"call{found.number:05d}"


def _next_mark(text: str, start: int) -> int:
    following = text.find(OPEN, start)
    return following if following >= 0 else len(text)
