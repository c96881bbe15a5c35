"""Tool calls as a Python list ``[f(a=1)]``: the whole answer (Llama 4, Llama 3.2), or between marks (LFM2)."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentrl.message import ToolCall
from agentrl.render.tool_parsers import (
    UNCLOSED_TAG,
    CollectedCalls,
    MalformedCall,
    ParsedCalls,
    ToolSchemas,
    collect_blocks,
    make_call,
)
from agentrl.render.tool_parsers.untagged import introduces_example, parse_or_read_untagged, read_untagged
from agentrl.render.tool_parsers.values import first_of, skip_space, whole_json

FORM = "Answer with [tool(argument=value)] and nothing else; put , between several calls, and name every argument."
_START, _END = "<|python_start|>", "<|python_end|>"
LFM2_OPEN, LFM2_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
LFM2_FORM = f"Write {LFM2_OPEN}[tool(argument=value)]{LFM2_CLOSE} with all calls, and name every argument."
UNLISTED = "a call outside a list"
UNESCAPED = "a string with unescaped quotes or line breaks, or a number with leading zeros"
_AFTER_STRING = re.compile(r"\s*(?:,\s*(?:[\w.$-]+\s*=|[\"'\[{]|-?\d|[TFNtfn]\w+\s*[,\])])|[)\]}:])")
"""Pattern of the text after a string in a call."""
_MAX_READINGS = 8
"""Maximum number of places where a string with unescaped quotes may end."""
_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=[1-9])")
BESIDE_TEXT = "a list of calls next to other text"
_FENCE = re.compile(r"\A```\w*|```\w*\Z")
_CALLS = re.compile(r"\[\s*([\w.-]+)\(")
_LETTER = re.compile("[A-Za-z_]")
_TOOL = re.compile(r"\s*(?P<name>[\w.-]+)\s*\(")
_ARGUMENT = re.compile(r"\s*(?P<name>[\w.$-]+)\s*=(?!=)")
_STRING = re.compile(r"(?P<quote>\"{3}|'{3}|[\"'])(?:\\.|(?!(?P=quote)).)*(?P=quote)?", re.DOTALL)
_CODE_BEFORE = re.compile(r"[\w\])\"']\Z|^\s*[\w.]+(?:\s*:\s*\w+)?\s*=\s*\Z|\w\((?:[^()]*,)?\s*\Z")
"""Pattern of the text before a list on its line if the list is part of an expression."""
_STAND_IN = "name_{}_"
_JSON_NAMES = {"true": True, "false": False, "null": None}


def parse(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Parse an answer that is a list of calls, or contains one as servers accept it.

    See `agentrl.render.tool_parsers`.
    """
    strict = _parse_strictly(text, tools)
    if not strict.problems:
        return strict
    for opening in _openings(text, tools):
        end = _list_end(text, opening.start())
        before, after = _strip_fence(text[: opening.start()]), _strip_fence(text[end:].lstrip("])}> \n"))
        if opening[1] in tools and not (before and after):
            found = _parse_strictly(text[opening.start() : end], tools)
            if len(found.calls) > len(strict.calls):
                content = "\n".join(part for part in (before, after) if part)
                return replace(found, content=content, repairs=(BESIDE_TEXT,) * len(found.calls))
        break
    return strict


def repair_pythonic(text: str, tools: ToolSchemas, *, is_whole: bool) -> ParsedCalls:
    """Read a list of calls, or JSON if there is none; a list in code or in an example is text."""
    served = parse(text, tools)
    if BESIDE_TEXT in served.repairs and _is_mentioned(text, _list_start(text, tools)):
        return ParsedCalls(content=text.strip())
    if served.calls:
        return served
    return read_untagged(text, tools, FORM, is_whole=is_whole) or served


def parse_lfm2(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Read every list of calls between the marks of LFM2; see `agentrl.render.tool_parsers`."""
    found = collect_blocks(text, LFM2_OPEN, partial(_read_lfm2_block, text, tools))
    found.content = ["\n".join(part for piece in found.content if (part := piece.strip()))]
    found.problems = [problem.replace(FORM, LFM2_FORM) for problem in found.problems]
    found.refuse_stray([LFM2_CLOSE], LFM2_OPEN, LFM2_FORM)
    return found.result()


repair_lfm2 = partial(parse_or_read_untagged, parse_lfm2, LFM2_FORM)


def _read_lfm2_block(text: str, tools: ToolSchemas, start: int, found: CollectedCalls) -> int:
    """Collect the calls of a list in Python's notation, or of one in JSON; return the index after it."""
    end = first_of(text, [LFM2_CLOSE, LFM2_OPEN], start)
    body = text[start:end].strip()
    slips = [] if text.startswith(LFM2_CLOSE, end) else [UNCLOSED_TAG]
    try:
        if body.startswith(("{", "[{")):
            value = whole_json(body, "The list of tool calls")
            reads = [partial(_json_call, item, tools) for item in (value if isinstance(value, list) else [value])]
        else:
            if not body.startswith("["):
                body = f"[{body}]"
                slips.append(UNLISTED)
            reads = _pythonic_calls(body, tools, slips)
        if not reads:
            raise MalformedCall(f"The list of tool calls is empty. {LFM2_FORM}")
    except MalformedCall as problem:
        found.problems.append(str(problem))
    else:
        for read in reads:
            if found.take(partial(read, number=found.number)):
                found.note(slips)
    if not text.startswith(LFM2_CLOSE, end):
        return end
    again = f"{text[start:end].strip()}{LFM2_CLOSE}"
    after = skip_space(text, end + len(LFM2_CLOSE))
    return after + len(again) if text.startswith(again, after) else end + len(LFM2_CLOSE)


def _pythonic_calls(body: str, tools: ToolSchemas, slips: list[str]) -> list[partial[ToolCall]]:
    """Return readers of the calls in a list, whose strings may contain unescaped quotes; each takes its `number`."""
    for longer in range(-1, _MAX_READINGS):
        reading = body if longer < 0 else _with_escapes(body, longer)
        written = _with_identifiers(reading)
        with contextlib.suppress(MalformedCall):
            items = _items(written.text)
            slips += [UNESCAPED] if reading != body else []
            return [partial(_call, item, written.names, tools) for item in items]
    _items(_with_identifiers(body).text)
    return []


def _json_call(item: Any, tools: ToolSchemas, number: int) -> ToolCall:
    if not isinstance(item, dict):
        raise MalformedCall(f"Item {number} of the list is not the call of a tool. {LFM2_FORM}")
    return make_call(item.get("name"), item.get("arguments", {}), tools, number)


def _with_escapes(body: str, longer: int) -> str:
    """Escape quotes and control characters within strings, and drop leading zeros of integers.

    The templates of LFM2.5 put strings in quotes without escapes. A string ends at the first quote after which the call
    goes on; the first string that contains quotes ends `longer` such quotes later.
    """
    pieces: list[str] = []
    cursor = 0
    while cursor < len(body):
        quote = body[cursor]
        cursor += 1
        if quote not in "'\"":
            zeros = _LEADING_ZEROS.match(body, cursor - 1)
            pieces.append("" if zeros else quote)
            cursor = zeros.end() if zeros else cursor
            continue
        end, is_quoted = cursor, False
        while end < len(body):
            if body[end] == quote:
                if _AFTER_STRING.match(body, end + 1) and not (is_quoted and longer):
                    break
                longer -= is_quoted and _AFTER_STRING.match(body, end + 1) is not None
                is_quoted = True
            end += 1 + (body[end] == "\\")
        inside = re.sub(r"(\\.)|" + quote, lambda found: found[1] or f"\\{found[0]}", body[cursor:end], flags=re.DOTALL)
        inside = re.sub(r"[\n\r\t\x00]", lambda found: repr(found[0])[1:-1], inside)
        pieces.append(f"{quote}{inside}{quote}")
        cursor = end + 1
    return "".join(pieces)


def _is_mentioned(text: str, start: int) -> bool:
    """Return True if the list at an index is a subscript or an assigned value in code, or an example."""
    return _CODE_BEFORE.search(text[:start].rpartition("\n")[2]) is not None or introduces_example(text[:start])


def _openings(text: str, tools: ToolSchemas) -> Iterator[re.Match[str]]:
    """Yield the beginnings of lists of calls: an identifier, or the name of a tool, which may start with a digit."""
    for opening in _CALLS.finditer(text):
        if opening[1] in tools or _LETTER.match(opening[1]):
            yield opening


def _list_start(text: str, tools: ToolSchemas) -> int:
    """Return the index of the first list of calls in a text, or the text's length."""
    return next((opening.start() for opening in _openings(text, tools)), len(text))


def _strip_fence(text: str) -> str:
    return _FENCE.sub("", text.strip()).strip()


def _list_end(text: str, start: int) -> int:
    """Return the index after the list that begins at an index."""
    depth, cursor = 0, start
    while cursor < len(text):
        if string := _STRING.match(text, cursor):
            cursor = string.end()
            continue
        depth += (text[cursor] in "([{") - (text[cursor] in ")]}")
        cursor += 1
        if depth == 0:
            break
    return cursor


def _parse_strictly(text: str, tools: ToolSchemas) -> ParsedCalls:
    body = text.strip().removeprefix(_START).removesuffix(_END).strip()
    start = _list_start(body, tools)
    if start:
        problems = (f"A tool call is next to other text. {FORM}",) if start < len(body) else ()
        return ParsedCalls(content=body, problems=problems)
    found = CollectedCalls()
    written = _with_identifiers(body)
    try:
        items = _items(written.text)
    except MalformedCall as problem:
        return ParsedCalls(content="", problems=(str(problem),))
    for item in items:
        found.take(partial(_call, item, written.names, tools, found.number))
    return found.result()


@dataclass(frozen=True, slots=True)
class _RenamedCalls:
    """List of calls in which every name is replaced by an identifier, and the names by these identifiers."""

    text: str
    names: Mapping[str, str]


def _with_identifiers(body: str) -> _RenamedCalls:
    """Replace the names of tools and arguments, which may contain - and ., or be keywords of Python."""
    pieces: list[str] = []
    names: dict[str, str] = {}
    cursor = depth = 0
    while cursor < len(body):
        if string := _STRING.match(body, cursor):
            pieces.append(string[0])
            cursor = string.end()
            continue
        letter = body[cursor]
        depth += (letter in "([{") - (letter in ")]}")
        pieces.append(letter)
        cursor += 1
        pattern = {1: _TOOL, 2: _ARGUMENT}.get(depth)
        if letter in "[(," and pattern is not None and (named := pattern.match(body, cursor)):
            stand_in = _STAND_IN.format(len(names))
            names[stand_in] = named["name"]
            pieces += [body[cursor : named.start("name")], stand_in]
            cursor = named.end("name")
    return _RenamedCalls("".join(pieces), names)


def _items(body: str) -> list[ast.expr]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings; the category depends on Python's version
            tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else "it cannot be read"
        raise MalformedCall(f"The list of tool calls is not valid Python: {reason}. {FORM}") from error
    if not isinstance(tree, ast.List):
        raise MalformedCall(f"The tool calls are not one list. {FORM}")
    return tree.elts


def _call(item: ast.expr, names: Mapping[str, str], tools: ToolSchemas, number: int) -> ToolCall:
    if not isinstance(item, ast.Call) or not isinstance(item.func, ast.Name):
        raise MalformedCall(f"Item {number} of the list is not the call of a tool. {FORM}")
    name = names.get(item.func.id, item.func.id)
    if item.args or any(keyword.arg is None for keyword in item.keywords):
        raise MalformedCall(f"Tool call {number} gives {name} an argument without its name. {FORM}")
    what = f"of {name} (tool call {number})"
    arguments: dict[str, Any] = {}
    for keyword in item.keywords:
        key = names.get(str(keyword.arg), str(keyword.arg))
        if key in arguments:
            raise MalformedCall(f"Tool call {number} gives {key!r} of {name} twice.")
        arguments[key] = _literal(keyword.value, f"{key!r} {what}")
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise MalformedCall(f"The arguments {what} cannot be written as JSON: {error}.") from error
    return make_call(name, arguments, tools, number)


def _literal(node: ast.expr, what: str) -> Any:
    """Return the value of a literal: a number, string, boolean, ``None``, or a list or dictionary of literals."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
        number = node.operand.value
        if isinstance(number, int | float) and isinstance(node.op, ast.USub | ast.UAdd):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_literal(item, what) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(k, what): _literal(v, what) for k, v in zip(node.keys, node.values, strict=True)}
    raise MalformedCall(f"{what} must be a literal value, not {_source(node)}. {FORM}")


def _source(node: ast.expr) -> str:
    try:
        return repr(ast.unparse(node)[:40])
    except RecursionError:
        return "a deeply nested expression"


def _key(node: ast.expr | None, what: str) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise MalformedCall(f"A key in {what} must be a string. {FORM}")
