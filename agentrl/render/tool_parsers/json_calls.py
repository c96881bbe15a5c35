"""Tool calls as JSON: Hermes, Qwen2.5, Qwen3 (``<tool_call>``), Llama 3 (bare objects), Mistral (``[TOOL_CALLS]``)."""

from __future__ import annotations

import re
from functools import partial

from agentrl.message import ToolCall
from agentrl.render.tool_parsers import Collected, Malformed, ParsedCalls, ToolSchemas, make_call
from agentrl.render.tool_parsers.values import JsonValue, read_json, skip_space

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HERMES_FORM = f'Write {OPEN}\n{{"name": "tool", "arguments": {{...}}}}\n{CLOSE}.'


def parse_hermes(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read every ``<tool_call>`` block; see `agentrl.render.tool_parsers`."""
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
        problems.append(f"{CLOSE} stands without {OPEN} before it. {HERMES_FORM}")
        remaining = remaining.replace(CLOSE, "")
    return ParsedCalls(content=remaining.strip(), calls=tuple(calls), problems=tuple(problems))


def _read_block(text: str, start: int, tools: ToolSchemas, number: int) -> ToolCall:
    try:
        body = read_json(text, start, f"Tool call {number}")
    except Malformed as problem:
        raise Malformed(f"{problem} {HERMES_FORM}") from problem
    if not text.startswith(CLOSE, body.end):
        extra = "was not closed" if body.end == len(text) else "goes on after its JSON object"
        raise Malformed(f"Tool call {number} {extra}. {HERMES_FORM}")
    if not isinstance(body.value, dict):
        raise Malformed(f"Tool call {number} must be a JSON object, not {type(body.value).__name__}. {HERMES_FORM}")
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


LLAMA3_FORM = 'Answer with {"name": "tool", "parameters": {...}} and nothing else; put ; between several calls.'
_PYTHON_TAG = "<|python_tag|>"
_CALL = re.compile(r'\{\s*"name"\s*:')


def parse_llama3_json(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read an answer that is one call or several with ``;`` between; see `agentrl.render.tool_parsers`."""
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{"):
        stray = _CALL.search(body)
        problems = (f"A tool call stands next to other text. {LLAMA3_FORM}",) if stray else ()
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
        raise Malformed(f"{problem} {LLAMA3_FORM}") from problem
    if not isinstance(value.value, dict):
        raise Malformed(f"Tool call {number} must be a JSON object, not {type(value.value).__name__}. {LLAMA3_FORM}")
    return value


def _call(value: JsonValue, tools: ToolSchemas, number: int) -> ToolCall:
    arguments = value.value.get("parameters", value.value.get("arguments", {}))
    return make_call(value.value.get("name"), arguments, tools, number)


MISTRAL_OPEN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
MISTRAL_FORM = f"Write {MISTRAL_OPEN}tool{ARGUMENTS}{{...}} for each call."
MISTRAL_ARRAY_FORM = f'Write {MISTRAL_OPEN} [{{"name": "tool", "arguments": {{...}}}}] with all calls.'
_ID = re.compile(r"[A-Za-z0-9]{9}")
_HEAD = re.compile(r"\s*(?P<name>[^\s\[\]{}]*)\s*(?:\[CALL_ID\](?P<id>[A-Za-z0-9]*)\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def parse_mistral(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read what follows every ``[TOOL_CALLS]``; see `agentrl.render.tool_parsers`."""
    found = Collected()
    cursor = 0
    while (start := text.find(MISTRAL_OPEN, cursor)) >= 0:
        found.content.append(text[cursor:start])
        begin = skip_space(text, start + len(MISTRAL_OPEN))
        read = _read_array if text.startswith(("[", "{"), begin) else _read_mistral_call
        cursor = read(text, begin, tools, found)
    found.content.append(text[cursor:])
    return found.result()


def _read_array(text: str, start: int, tools: ToolSchemas, found: Collected) -> int:
    """Collect the calls of an array, or of a lone object; the index after it."""
    try:
        array = read_json(text, start, "The array of tool calls")
    except Malformed as problem:
        found.problems.append(f"{problem} {MISTRAL_ARRAY_FORM}")
        return _next_mark(text, start)
    for item in array.value if isinstance(array.value, list) else [array.value]:
        found.take(partial(_call_of, item, tools, found))
    if array.value == []:
        found.problems.append(f"The array of tool calls is empty. {MISTRAL_ARRAY_FORM}")
    return array.end


def _call_of(item: object, tools: ToolSchemas, found: Collected) -> ToolCall:
    number = found.number
    if not isinstance(item, dict):
        raise Malformed(f"Tool call {number} must be a JSON object, not {type(item).__name__}. {MISTRAL_ARRAY_FORM}")
    return make_call(item.get("name"), item.get("arguments", {}), tools, number, _call_id(item.get("id"), found))


def _read_mistral_call(text: str, start: int, tools: ToolSchemas, found: Collected) -> int:
    """Collect a call that begins with its name; the index after it."""
    number, end = found.number, start

    def read() -> ToolCall:
        nonlocal end
        head = _HEAD.match(text, start)
        if head is None:
            raise Malformed(
                f"Tool call {number} is not a name with {ARGUMENTS} and a JSON object after it. {MISTRAL_FORM}"
            )
        try:
            body = read_json(text, head.end(), f"The arguments of tool call {number}")
        except Malformed as problem:
            raise Malformed(f"{problem} {MISTRAL_FORM}") from problem
        end = body.end
        return make_call(head["name"] or None, body.value, tools, number, _call_id(head["id"], found))

    return end if found.take(read) or end > start else _next_mark(text, start)


def _call_id(written: object, found: Collected) -> str:
    """The id that the model wrote, if it is one; else nine letters and digits, as Mistral's templates ask for."""
    if isinstance(written, str) and _ID.fullmatch(written) and all(call.id != written for call in found.calls):
        return written
    return f"call{found.number:05d}"


def _next_mark(text: str, start: int) -> int:
    following = text.find(MISTRAL_OPEN, start)
    return following if following >= 0 else len(text)
