"""Parser of JSON calls without the notation's own marks, as small models write them: bare, fenced or in other tags.

Such calls must be at the end of the answer, each on its own lines: JSON in the middle of a text is part of the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.message import ToolCall
from agentrl.render.tool_parsers import (
    LISTED,
    PARAMETERS,
    UNCLOSED_TAG,
    CollectedCalls,
    MalformedCall,
    ParsedCalls,
    ToolParser,
    ToolSchemas,
    make_call,
    parameters_of,
)
from agentrl.render.tool_parsers.mended_json import read_mended
from agentrl.render.tool_parsers.values import skip_space
from agentrl.tool.json_schema import fits, misfits

UNTAGGED = "no tags"
FENCED = "a code fence"
OTHER_TAG = "other tags"
EXTRA = "too many closing brackets"
NESTED = "an object around the call"
AS_TEXT = "arguments as text"
NO_ARGUMENTS = "no arguments"

SERVED = frozenset({UNCLOSED_TAG, LISTED, PARAMETERS})
"""Deviations that the parsers of inference servers accept; the tool itself then checks the arguments, as there."""
MAX_ATTEMPTS = 32
"""Maximum number of places in an answer that are tried; each may require reading the rest of the answer."""
_TAG_NAMES = "tool_call|tool_calls|tools|tool|function_call|function_calls|functions"
_MARK = re.compile(rf"(?P<tag><(?:{_TAG_NAMES})>)|(?P<fence>```[\w-]*)|</(?:{_TAG_NAMES}|function)>|[;,]")
_SERVED_CANDIDATE = rf"<(?:{_TAG_NAMES})>|^[ \t]*(?P<line>```|\{{|\[)"
_CANDIDATE = re.compile(rf"{_SERVED_CANDIDATE}|<function=(?=[\w.-]+>)", re.MULTILINE)
_INLINE = re.compile(rf"{_SERVED_CANDIDATE}|(?=\{{\s*\"name\"\s*:)", re.MULTILINE)
_NAMED = re.compile(r"<function=(?P<name>[\w.-]+)>\s*(?=\{)")
"""Pattern of a tag with a tool's name around JSON arguments, as Llama 3.1 writes calls of tools in a system prompt."""
_BEGINNING = re.compile(
    r'(?:\[\s*)?\{\s*"(?:name|type|id|index|arguments|parameters|function|tool_call|function_call)s?"'
)
_LONE_FENCE = re.compile(r"```[ \t]*$", re.MULTILINE)
FENCE = re.compile(r"\s*```[\w-]*\s*")
_EXTRA = re.compile(r"[}\]\s]*[}\]]\s*(?=</?\w|```|[{\[]|\Z)")
ENDS = ("</", "<tool", "```")
_WRAPPERS = ("function", "tool_call", "function_call")
_LISTS = ("tool_calls", "function_calls")
_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"name", "type", "id", "index", *_ARGUMENTS})
_INTRODUCES = re.compile(
    r"(?:\bfor (?:example|instance|reference)\b|\be\.g\.|\b(?:an|another) (?:\w+ )?example\b|^\W*example\b"
    r"|\b(?:wrong|incorrect|invalid|malformed) (?:form|format|call|way|notation|syntax|example|answer)\b"
    r"|\b(?:do not|don't|never) (?:write|use|send|answer|call)\b"
    r"|\ba (?:tool |function )?call (?:would|could|might|may)\b)[^.!?\n]*\Z"
    r"|\b(?:looks? like(?: this| that| the following)?|or|or else|alternatively|instead of)\W*\Z",
    re.IGNORECASE,
)
_BYTE_ORDER_MARK = "\ufeff"
_MAX_SENTENCE_CHARS = 200
_OPENED_FENCE = re.compile(r"```[\w-]*\s*\Z")


@dataclass(frozen=True, slots=True)
class IntendedCall:
    """Intended call, and its deviations from the notation."""

    name: object
    arguments: object
    slips: tuple[str, ...] = ()


def intended_calls(value: Any, slips: Sequence[str]) -> list[IntendedCall]:
    """Return the calls in a JSON value; none if any part of it is something else."""
    if isinstance(value, dict) and len(value) == 1:
        value = next((value[key] for key in _LISTS if isinstance(value.get(key), list)), value)
    items = value if isinstance(value, list) else [value]
    if any(map(_describes_tool, items)):
        return []
    found = [intended_call(item, tuple(slips)) for item in items]
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) else []


def intended_call(item: Any, slips: tuple[str, ...]) -> IntendedCall | None:
    """Return the call in an object; ``None`` if it is something else."""
    if not isinstance(item, dict):
        return None
    inner = next((item[key] for key in _WRAPPERS if isinstance(item.get(key), dict)), None)
    if inner is not None and "name" not in item and NESTED not in slips:
        return intended_call(inner, (*slips, NESTED))
    given = next((key for key in _ARGUMENTS if key in item), None)
    if given is None or not isinstance(item.get("name"), str) or not item.keys() <= _CALL_KEYS:
        return None
    arguments = item[given]
    if given == "parameters":
        slips = (*slips, PARAMETERS)
        if _is_schema(arguments):
            return None
    if is_nothing(arguments):
        arguments, slips = {}, (*slips, NO_ARGUMENTS)
    elif isinstance(arguments, str):
        arguments, slips = _from_text(arguments), (*slips, AS_TEXT)
    return IntendedCall(item["name"], arguments, slips)


def _describes_tool(item: Any) -> bool:
    """Return True if an object repeats a prompt's description of a tool without arguments."""
    if not isinstance(item, dict) or item.get("type") != "function":
        return False
    described = item.get("function")
    return isinstance(described, dict) and "arguments" not in described and described.get("parameters") == {}


def _is_schema(parameters: Any) -> bool:
    if not isinstance(parameters, dict) or parameters.get("type") != "object":
        return False
    return "properties" in parameters or parameters.keys() <= {"type", "required", "additionalProperties", "$schema"}


def is_nothing(arguments: Any) -> bool:
    """Return True for null or an empty text, which models write for no arguments."""
    return arguments is None or (isinstance(arguments, str) and not arguments.strip())


def introduces_example(before: str) -> bool:
    """Return True if the text directly before a call introduces it as an example or an alternative."""
    before = _OPENED_FENCE.sub("", before[-_MAX_SENTENCE_CHARS:].rstrip()).rstrip()
    return _INTRODUCES.search(before.rpartition("\n")[2]) is not None


def _from_text(arguments: str) -> Any:
    try:
        return read_mended(arguments, 0, "", is_whole=False).value
    except MalformedCall:
        return arguments


def take_intended(call: IntendedCall, tools: ToolSchemas, found: CollectedCalls, form: str) -> None:
    """Keep a repaired call if it names an offered tool and its arguments fit, or else record its problem."""
    number = found.number

    def read() -> ToolCall:
        made = make_call(call.name, call.arguments, tools, number)
        root = parameters_of(made.name, tools)
        if SERVED.issuperset(call.slips):
            return made
        if not fits(dict(made.arguments), root, root):
            reason = misfits(made.arguments, root)
            raise MalformedCall(
                f"Tool call {number} is not in the right form, and its arguments do not fit {made.name}"
                f"{reason and f': {reason}'}. {form}"
            )
        return made

    if found.take(read):
        found.note(call.slips)


@dataclass(frozen=True, slots=True)
class _Region:
    """End of an answer that consists only of calls."""

    start: int
    calls: tuple[IntendedCall, ...]


@dataclass(frozen=True, slots=True)
class _ParseFailure:
    """Place in an answer that is not a call."""

    at: int
    was_read: bool = False
    """True if the text began like a call, so that a long text may have been read."""


def read_untagged(
    text: str, tools: ToolSchemas, form: str, *, is_whole: bool, own: frozenset[str] = frozenset(), inline: bool = False
) -> ParsedCalls | None:
    """Return the unmarked calls at the end of an answer; ``None`` if it does not end with calls.

    Args:
        text: Text of the answer.
        tools: Offered tools.
        form: Sentence that shows the model how to write calls.
        is_whole: The answer was not cut.
        own: Deviations that the model's notation allows.
        inline: Read Llama's calls as servers do: a call may follow text on its line, be an example or be in code.
    """
    text = text.removeprefix(_BYTE_ORDER_MARK)
    region = _find_region(text, is_whole=is_whole, inline=inline)
    if region is None or not any(call.name in tools for call in region.calls):
        return None
    if not inline and introduces_example(text[: region.start]):
        return None
    found = CollectedCalls(content=[text[: region.start]])
    for call in region.calls:
        take_intended(call, tools, found, form)
    return found.result()


def _find_region(text: str, *, is_whole: bool, inline: bool) -> _Region | None:
    failed, attempts, is_fenced = -1, 0, False
    for candidate in (_INLINE if inline else _CANDIDATE).finditer(text):
        start = candidate.start("line") if candidate["line"] else candidate.start()
        if candidate["line"] == "```":
            is_fenced = not (is_fenced and _LONE_FENCE.match(text, start))
            if not is_fenced:
                continue  # the end of a block of other code
        elif is_fenced and not inline:
            continue  # a part of the code
        if start < failed:
            continue
        match _read_region(text, start, is_whole=is_whole):
            case _ParseFailure(at, was_read):
                failed, attempts = at, attempts + was_read
                if attempts == MAX_ATTEMPTS:
                    return None
            case region:
                return region
    return None


def _read_region(text: str, start: int, *, is_whole: bool) -> _Region | _ParseFailure:
    """Read marks and calls from `start` to the end of the text."""
    calls: list[IntendedCall] = []
    marks: set[str] = set()
    cursor = start
    while cursor < len(text):
        if mark := _MARK.match(text, cursor):
            marks |= {OTHER_TAG} if mark["tag"] else {FENCED} if mark["fence"] else set()
            cursor = skip_space(text, mark.end())
            continue
        named = _NAMED.match(text, cursor)
        if named is None and not _BEGINNING.match(text, cursor):
            return _ParseFailure(cursor + 1)
        try:
            value = read_mended(text, named.end() if named else cursor, "", ends=ENDS, is_whole=is_whole)
        except MalformedCall:
            return _ParseFailure(cursor + 1, was_read=True)
        cursor, extra = after_extra(text, value.end)
        slips = (*value.mends, *extra)
        if named:
            intended = [IntendedCall(named["name"], value.value, slips)]
            marks.add(OTHER_TAG)
        else:
            intended = intended_calls(value.value, slips)
        if not intended:
            return _ParseFailure(cursor + 1)
        calls += intended
    if not calls:
        return _ParseFailure(start + 1)
    around = sorted(marks) or [UNTAGGED]
    return _Region(start, tuple(IntendedCall(call.name, call.arguments, (*around, *call.slips)) for call in calls))


def after_extra(text: str, cursor: int) -> tuple[int, tuple[str, ...]]:
    """Return the index after unmatched closing brackets, and the deviation if there are any."""
    extra = _EXTRA.match(text, cursor)
    return (extra.end(), (EXTRA,)) if extra else (cursor, ())


def parse_or_read_untagged(
    parse: ToolParser, form: str, text: str, tools: ToolSchemas, *, is_whole: bool
) -> ParsedCalls:
    """Read calls in the notation, or JSON if there are none."""
    served = parse(text, tools)
    if served.calls:
        return served
    return read_untagged(text, tools, form, is_whole=is_whole) or served
