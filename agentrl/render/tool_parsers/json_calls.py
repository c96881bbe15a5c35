"""Tool calls as JSON: Hermes, Qwen2.5, Qwen3 (``<tool_call>``), Llama 3 (bare objects), Mistral, Apertus."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agentrl.message import ToolCall
from agentrl.render.tool_parsers import (
    LISTED,
    PARAMETERS,
    UNCLOSED_TAG,
    CollectedCalls,
    MalformedCall,
    ParsedCalls,
    ToolSchemas,
    collect_blocks,
    make_call,
    shows_example,
)
from agentrl.render.tool_parsers.mended_json import read_mended
from agentrl.render.tool_parsers.tolerant_tags import DAMAGED, fitting_call
from agentrl.render.tool_parsers.untagged import (
    ENDS,
    FENCE,
    FENCED,
    NO_ARGUMENTS,
    UNTAGGED,
    IntendedCall,
    after_extra,
    intended_call,
    is_nothing,
    parse_or_read_untagged,
    read_untagged,
    take_intended,
)
from agentrl.render.tool_parsers.values import after_block, first_of, read_json, skip_space

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HERMES_FORM = f'Write {OPEN}\n{{"name": "tool", "arguments": {{...}}}}\n{CLOSE}.'
BESIDE_TEXT = "a call next to other text"
LLAMA3_FORM = 'Answer with {"name": "tool", "parameters": {...}} and nothing else; put ; between several calls.'
_PYTHON_TAG = "<|python_tag|>"
_LABELS = frozenset({"name", "id", "type"})
"""Keys of a call besides its arguments."""
_CALL = re.compile(r'\{\s*"name"\s*:')
MISTRAL_OPEN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
MISTRAL_FORM = f"Write {MISTRAL_OPEN}tool{ARGUMENTS}{{...}} for each call."
MISTRAL_ARRAY_FORM = f'Write {MISTRAL_OPEN} [{{"name": "tool", "arguments": {{...}}}}] with all calls.'
APERTUS_OPEN, APERTUS_CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"
APERTUS_FORM = f'Write {APERTUS_OPEN}[{{"tool": {{...}}}}]{APERTUS_CLOSE} with all calls.'
_APERTUS_END = re.compile(r"<\|tools_suffix\|>|(?:<[^<>]*>?\s*)?\Z")
_ID = re.compile(r"[A-Za-z0-9]{9}")
_ALONE = re.compile(r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[ARGS\]\s*)?(?=\[TOOL_CALLS\]|\Z)")
_HEAD = re.compile(r"\s*(?P<name>[^\s\[\]{}]*)\s*(?:\[CALL_ID\](?P<id>[A-Za-z0-9]*)\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def parse_hermes(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read every ``<tool_call>`` block; see `agentrl.render.tool_parsers`."""

    def read(start: int, found: CollectedCalls) -> int:
        end = _read_block(text, start, tools, found)  # an argument may contain the marks
        return after_block(text, end, OPEN, CLOSE)

    if shows_example(text, OPEN):
        return ParsedCalls(content=text.strip())
    found = collect_blocks(text, OPEN, read)
    found.content = ["".join(found.content)]
    found.refuse_stray([CLOSE], OPEN, HERMES_FORM)
    return found.result()


def _read_block(text: str, start: int, tools: ToolSchemas, found: CollectedCalls) -> int:
    """Collect the content of a block: a call, or a list of calls as SGLang accepts; the last block may be unclosed.

    Return the index after the JSON value, or `start` if there is none.
    """
    end = start
    try:
        body = read_json(text, start, f"Tool call {found.number}", HERMES_FORM)
        end = body.end
        is_closed = text.startswith(CLOSE, body.end)
        if not is_closed and body.end < len(text):
            raise MalformedCall(f"Tool call {found.number} continues after its JSON object. {HERMES_FORM}")
        if body.value == []:
            raise MalformedCall(f"The list of tool calls is empty. {HERMES_FORM}")
    except MalformedCall as problem:
        found.problems.append(str(problem))
        return end
    is_list = isinstance(body.value, list)
    slips = [*([] if is_closed else [UNCLOSED_TAG]), *([LISTED] if is_list else [])]
    for item in body.value if is_list else [body.value]:
        _take_call(item, tools, found, slips)
    return end


def _take_call(item: object, tools: ToolSchemas, found: CollectedCalls, slips: Sequence[str]) -> None:
    number = found.number

    def read() -> ToolCall:
        call = _object(item, number, HERMES_FORM)
        _require_arguments(call, number, HERMES_FORM)
        return make_call(call.get("name"), _arguments_of(call), tools, number)

    if found.take(read):
        renamed = [PARAMETERS] if isinstance(item, dict) and "arguments" not in item and "parameters" in item else []
        empty = [NO_ARGUMENTS] if isinstance(item, dict) and is_nothing(_written_arguments(item)) else []
        found.note([*slips, *renamed, *empty])


def _written_arguments(call: Mapping[str, Any]) -> Any:
    return call.get("arguments", call.get("parameters", {}))


def _arguments_of(call: Mapping[str, Any]) -> Any:
    written = _written_arguments(call)
    return {} if is_nothing(written) else written


def _require_arguments(call: Mapping[str, Any], number: int, form: str) -> None:
    """Refuse a call whose arguments are next to its name: they would be lost.

    A call of a tool without parameters may lack its arguments.

    Raises:
        MalformedCall: the call has other keys, but no arguments.
    """
    others = sorted(call.keys() - _LABELS)
    if others and "name" in call and "arguments" not in call and "parameters" not in call:
        names = ", ".join(map(repr, others))
        raise MalformedCall(f'Tool call {number} has no "arguments", but {names} next to its name. {form}')


def _object(value: object, number: int, form: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedCall(f"Tool call {number} must be a JSON object, not {type(value).__name__}. {form}")
    return value


def repair_hermes(text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
    """Read ``<tool_call>`` blocks with deviations, or calls without the tag."""
    strict = parse_hermes(text, tools)
    if strict.calls and not strict.problems:
        return strict
    if OPEN not in text or shows_example(text, OPEN):
        return read_untagged(text, tools, HERMES_FORM, is_whole=is_whole) or strict

    def read(start: int, found: CollectedCalls) -> int:
        return _repair_block(text, start, tools, found, is_whole=is_whole)

    found = collect_blocks(text, OPEN, read)
    found.content = ["".join(found.content)]
    found.refuse_stray([CLOSE], OPEN, HERMES_FORM)
    return found.result()


def _repair_block(text: str, start: int, tools: ToolSchemas, found: CollectedCalls, *, is_whole: bool) -> int:
    """Collect the calls of the block whose body begins at an index; return the index after the block."""
    fence = FENCE.match(text, start)
    begin = fence.end() if fence else start
    try:
        body = read_mended(text, begin, f"Tool call {found.number}", ends=ENDS, is_whole=is_whole)
    except MalformedCall as problem:
        found.problems.append(f"{problem} {HERMES_FORM}")
        return after_block(text, start, OPEN, CLOSE)
    end, extra = after_extra(text, body.end)
    if fence and (closing := FENCE.match(text, end)):
        end = closing.end()
    is_closed = text.startswith(CLOSE, end)
    if not is_closed and CLOSE in text[end : first_of(text, [OPEN], end)]:
        found.problems.append(f"Tool call {found.number} continues after its JSON object. {HERMES_FORM}")
        return after_block(text, end, OPEN, CLOSE)
    slips = [*([FENCED] if fence else []), *([] if is_closed else [UNCLOSED_TAG]), *body.mends, *extra]
    items = body.value if isinstance(body.value, list) else [body.value]
    if isinstance(body.value, list):
        slips.append(LISTED)
    if not items:
        found.problems.append(f"The list of tool calls is empty. {HERMES_FORM}")
    for item in items:
        call = intended_call(item, tuple(slips))
        if call is None and isinstance(item, dict):
            try:
                _require_arguments(item, found.number, HERMES_FORM)
            except MalformedCall as problem:
                found.problems.append(str(problem))
                continue
        take_intended(call or _as_intended(item, tuple(slips)), tools, found, HERMES_FORM)
    return end + len(CLOSE) if is_closed else end


def _as_intended(item: Any, slips: tuple[str, ...]) -> IntendedCall:
    """Return a value inside the notation's own mark as a call, which may lack parts."""
    if not isinstance(item, dict):
        return IntendedCall(None, item, slips)
    return IntendedCall(item.get("name"), item.get("arguments", {}), slips)


def parse_llama3_json(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Parse an answer that is one call or several separated by ``;``, or ends with calls as servers accept them."""
    strict = _parse_llama3_strictly(text, tools)
    return read_llama3(strict, text, tools, is_whole=False) if strict.problems else strict


def read_llama3(strict: ParsedCalls, text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
    """Return the calls at the end of an answer if there are more than the strict parser found."""
    own = frozenset({UNTAGGED, PARAMETERS})
    found = read_untagged(text, tools, LLAMA3_FORM, is_whole=is_whole, own=own, inline=True)
    if found is None or len(found.calls) <= len(strict.calls):
        return strict
    return found if found.repairs else replace(found, repairs=(BESIDE_TEXT,) * len(found.calls))


def repair_llama3_json(text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
    """Read calls in fences or tags, or with deviations in their JSON."""
    served = parse_llama3_json(text, tools)
    if served.problems:
        served = read_llama3(served, text, tools, is_whole=is_whole)
    if served.calls:
        return served
    return read_untagged(text, tools, LLAMA3_FORM, is_whole=is_whole) or served


def _parse_llama3_strictly(text: str, tools: ToolSchemas) -> ParsedCalls:
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{"):
        stray = _CALL.search(body)
        problems = (f"A tool call is next to other text. {LLAMA3_FORM}",) if stray else ()
        return ParsedCalls(content=body, problems=problems)
    found = CollectedCalls()
    cursor = 0
    while cursor < len(body):
        try:
            value = read_json(body, cursor, f"Tool call {found.number}", LLAMA3_FORM)
            call = _object(value.value, found.number, LLAMA3_FORM)
        except MalformedCall as problem:
            found.problems.append(str(problem))
            break
        cursor = skip_space(body, value.end + 1) if body.startswith(";", value.end) else value.end
        found.take(partial(_llama3_call, call, tools, found.number))
    return found.result()


def _llama3_call(call: Mapping[str, Any], tools: ToolSchemas, number: int) -> ToolCall:
    _require_arguments(call, number, LLAMA3_FORM)
    return make_call(call.get("name"), call.get("parameters", call.get("arguments", {})), tools, number)


def parse_mistral(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read the calls after each ``[TOOL_CALLS]``; see `agentrl.render.tool_parsers`."""

    def read(start: int, found: CollectedCalls) -> int:
        start = skip_space(text, start)
        read_calls = _read_array if text.startswith(("[", "{"), start) else _read_mistral_call
        return read_calls(text, start, tools, found)

    return collect_blocks(text, MISTRAL_OPEN, read).result()


def repair_mistral(text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
    """Read an array of calls with deviations in its JSON, or calls without the mark."""
    served = parse_mistral(text, tools)
    if served.calls:
        return served
    return read_untagged(text.replace(MISTRAL_OPEN, "\n"), tools, MISTRAL_FORM, is_whole=is_whole) or served


def _read_array(text: str, start: int, tools: ToolSchemas, found: CollectedCalls) -> int:
    """Collect the calls of an array or of a single object; return the index after it."""
    try:
        array = read_json(text, start, "The array of tool calls", MISTRAL_ARRAY_FORM)
    except MalformedCall as problem:
        found.problems.append(str(problem))
        return first_of(text, [MISTRAL_OPEN], start)
    for item in array.value if isinstance(array.value, list) else [array.value]:
        found.take(partial(_call_of, item, tools, found))
    if array.value == []:
        found.problems.append(f"The array of tool calls is empty. {MISTRAL_ARRAY_FORM}")
    return array.end


def _call_of(item: object, tools: ToolSchemas, found: CollectedCalls) -> ToolCall:
    call = _object(item, found.number, MISTRAL_ARRAY_FORM)
    _require_arguments(call, found.number, MISTRAL_ARRAY_FORM)
    made = make_call(call.get("name"), _arguments_of(call), tools, found.number, _call_id(call.get("id"), found))
    if "arguments" not in call and "parameters" in call:
        found.note([PARAMETERS])
    return made


def _read_mistral_call(text: str, start: int, tools: ToolSchemas, found: CollectedCalls) -> int:
    """Collect a call that begins with its name; return the index after it."""
    number, end = found.number, start

    def read() -> ToolCall:
        nonlocal end
        head = _HEAD.match(text, start)
        if head is None and (alone := _ALONE.match(text, start)):
            end = alone.end()
            call = fitting_call(alone["name"], {}, tools, number, _call_id(None, found))
            found.note([NO_ARGUMENTS])
            return call
        if head is None:
            raise MalformedCall(
                f"Tool call {number} is not a name with {ARGUMENTS} and a JSON object after it. {MISTRAL_FORM}"
            )
        body = read_json(text, head.end(), f"The arguments of tool call {number}", MISTRAL_FORM)
        end = body.end
        return make_call(head["name"] or None, body.value, tools, number, _call_id(head["id"], found))

    return end if found.take(read) or end > start else first_of(text, [MISTRAL_OPEN], start)


def _call_id(written: object, found: CollectedCalls) -> str:
    """Return the model's id if it is valid and unique, or else nine characters as Mistral's templates require."""
    if isinstance(written, str) and _ID.fullmatch(written) and all(call.id != written for call in found.calls):
        return written
    return f"call{found.number:05d}"


def parse_apertus(text: str, tools: ToolSchemas, *, is_whole: bool = False) -> ParsedCalls:
    """Read every list of calls between the marks of Apertus, with damaged marks or brackets as servers accept them."""

    def read(start: int, found: CollectedCalls) -> int:
        try:
            body = read_mended(text, start, "The list of tool calls", ends=("<|",), is_whole=is_whole)
            closing = _APERTUS_END.match(text, body.end)
            if closing is None or not isinstance(body.value, list) or not body.value:
                raise MalformedCall("The tool calls are not one list of objects.")
        except MalformedCall as problem:
            found.problems.append(f"{problem} {APERTUS_FORM}")
            return after_block(text, start, APERTUS_OPEN, APERTUS_CLOSE)
        damaged = [] if closing[0] in ("", APERTUS_CLOSE) else [DAMAGED]  # sampling stops at the mark
        for item in body.value:
            if found.take(partial(_keyed_call, item, tools, found.number, mended=bool(body.mends))):
                found.note([*damaged, *body.mends])
        return closing.end()

    found = collect_blocks(text, APERTUS_OPEN, read)
    found.refuse_stray([APERTUS_CLOSE], APERTUS_OPEN, APERTUS_FORM)
    return found.result()


def repair_apertus(text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
    """Read lists whose last brackets are missing, or JSON without the marks."""
    return parse_or_read_untagged(
        partial(parse_apertus, is_whole=is_whole), APERTUS_FORM, text, tools, is_whole=is_whole
    )


def _keyed_call(item: object, tools: ToolSchemas, number: int, *, mended: bool) -> ToolCall:
    call = _object(item, number, APERTUS_FORM)
    if len(call) != 1:
        raise MalformedCall(f"Tool call {number} is not an object with the tool's name as its only key. {APERTUS_FORM}")
    ((name, arguments),) = call.items()
    made = make_call(name or None, arguments, tools, number)
    return fitting_call(name, made.arguments, tools, number) if mended else made
