"""Repair of calls that are recognisable although they deviate from the model's notation.

A repaired call must name an offered tool, and its arguments must fit the tool's schema. Repairs are calls without their
tags (see `agentrl.render.tool_parsers.untagged`) and, within the tags, missing closing brackets or trailing commas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from agentrl.render.tool_parsers import (
    LISTED,
    UNCLOSED_TAG,
    CallRepair,
    CollectedCalls,
    MalformedCall,
    ParsedCalls,
    ToolParser,
    ToolSchemas,
    collect_blocks,
    deepseek,
    json_calls,
    parameters_of,
    pythonic,
    shows_example,
    xml_calls,
)
from agentrl.render.tool_parsers.json_calls import CLOSE, HERMES_FORM, OPEN
from agentrl.render.tool_parsers.mended_json import read_mended
from agentrl.render.tool_parsers.untagged import (
    ENDS,
    FENCE,
    FENCED,
    IntendedCall,
    after_extra,
    intended_call,
    introduces_example,
    read_untagged,
    take_intended,
)
from agentrl.render.tool_parsers.values import after_block, first_of
from agentrl.tool.json_schema import fits


def repair_hermes(text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
    """Read ``<tool_call>`` blocks with deviations, or calls without the tag."""
    strict = json_calls.parse_hermes(text, tools)
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
        call = intended_call(item, tuple(slips)) or _as_intended(item, tuple(slips))
        take_intended(call, tools, found, HERMES_FORM)
    return end + len(CLOSE) if is_closed else end


def _as_intended(item: Any, slips: tuple[str, ...]) -> IntendedCall:
    """Return a value inside the notation's own mark as a call, which may lack parts."""
    if not isinstance(item, dict):
        return IntendedCall(None, item, slips)
    return IntendedCall(item.get("name"), item.get("arguments", {}), slips)


def _unless_empty(served: ParsedCalls, form: str, text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
    """Return the calls that the parser found, or JSON without tags if there are none."""
    return served if served.calls else read_untagged(text, tools, form, is_whole=is_whole) or served


def repair_llama3_json(text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
    """Read calls in fences or tags, or with deviations in their JSON."""
    served = json_calls.parse_llama3_json(text, tools)
    if served.problems:
        served = json_calls.read_llama3(served, text, tools, is_whole=is_whole)
    return _unless_empty(served, json_calls.LLAMA3_FORM, text, tools, is_whole=is_whole)


def _or_untagged(parse: ToolParser, form: str, text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
    """Read calls in the notation, or JSON if there are none."""
    return _unless_empty(parse(text, tools), form, text, tools, is_whole=is_whole)


def _complete_tags(
    parse: ToolParser, form: str, ending: str, text: str, tools: ToolSchemas, *, is_whole: bool
) -> ParsedCalls:
    """Read calls in tags, whose last argument may end with the answer, or JSON if there are none."""
    served = parse(text, tools)
    if is_whole and served.problems:
        completed = parse(_BROKEN_END.sub("", text).rstrip() + ending, tools)
        if len(completed.calls) > len(served.calls) and not completed.problems and _all_fit(completed, tools):
            return completed if completed.repairs else replace(completed, repairs=(UNCLOSED_TAG,))
    return _unless_empty(served, form, text, tools, is_whole=is_whole)


def _all_fit(parsed: ParsedCalls, tools: ToolSchemas) -> bool:
    return all(fits(dict(call.arguments), root := parameters_of(call.name, tools), root) for call in parsed.calls)


def repair_pythonic(text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
    """Read a list of calls, or JSON if there is none; a list in code or in an example is text."""
    served = pythonic.parse(text, tools)
    if pythonic.BESIDE_TEXT in served.repairs and _is_mentioned(text, pythonic.list_start(text)):
        return ParsedCalls(content=text.strip())
    return _unless_empty(served, pythonic.FORM, text, tools, is_whole=is_whole)


def _is_mentioned(text: str, start: int) -> bool:
    """Return True if the list at an index is a subscript or an assigned value in code, or an example."""
    return _CODE_BEFORE.search(text[:start].rpartition("\n")[2]) is not None or introduces_example(text[:start])


def repair_mistral(text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
    """Read an array of calls with deviations in its JSON, or calls without the mark."""
    served, form = json_calls.parse_mistral(text, tools), json_calls.MISTRAL_FORM
    return _unless_empty(served, form, text.replace(json_calls.MISTRAL_OPEN, "\n"), tools, is_whole=is_whole)


_BROKEN_END = re.compile(r"<(?:/[^<>]*)?\Z")
_CODE_BEFORE = re.compile(r"[\w\])\"']\Z|^\s*[\w.]+(?:\s*:\s*\w+)?\s*=\s*\Z|\w\((?:[^()]*,)?\s*\Z")
"""Pattern of the text before a list on its line if the list is part of an expression."""
REPAIRS: Mapping[str, CallRepair] = {
    "hermes": repair_hermes,
    "llama3_json": repair_llama3_json,
    "mistral": repair_mistral,
    "pythonic": repair_pythonic,
    "qwen3_coder": partial(
        _complete_tags,
        xml_calls.parse_qwen3_coder,
        xml_calls.QWEN3_CODER_FORM,
        "\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": partial(_complete_tags, xml_calls.parse_glm, xml_calls.GLM_FORM, "</arg_value>\n</tool_call>"),
    "minimax_m2": partial(
        _complete_tags,
        xml_calls.parse_minimax_m2,
        xml_calls.parse_minimax_m2.form,
        xml_calls.parse_minimax_m2.ending,
    ),
    "deepseek_v32": partial(
        _complete_tags,
        xml_calls.parse_deepseek_v32,
        xml_calls.parse_deepseek_v32.form,
        xml_calls.parse_deepseek_v32.ending,
    ),
    "deepseek_v3": partial(_or_untagged, deepseek.parse_v3, deepseek.V3.form),
    "deepseek_v31": partial(_or_untagged, deepseek.parse_v31, deepseek.V31.form),
    "kimi_k2": partial(_or_untagged, deepseek.parse_kimi_k2, deepseek.MARKS.form),
}
"""Repairs by the registry name of the parser."""
