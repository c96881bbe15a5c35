"""Strict readers of argument values: JSON at an index of a text, and text by the declared types of the tool."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from agentrl.render.tool_parsers import MalformedCall, ToolSchemas, parameters_of
from agentrl.tool.json_schema import declared_types, is_of_type, literals, property_schema

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class JsonValue:
    """Value with the index after it in the text."""

    value: Any
    end: int


def read_json(text: str, start: int, what: str, form: str = "") -> JsonValue:
    """Read the JSON value at `start`, and skip white space before and after it; `form` ends the error message.

    Raises:
        MalformedCall: the value is not valid JSON, not finite, or cannot be encoded as UTF-8.
    """
    begin = skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, begin)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos - begin + 1}"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:
        reason = str(error)
    else:
        return JsonValue(value, skip_space(text, end))
    raise MalformedCall(f"{what} is not valid JSON: {reason}. {form}".rstrip())


def first_of(text: str, marks: Sequence[str], start: int = 0) -> int:
    """Return the index of the first of `marks` from `start` on; the end of the text if there is none."""
    return min((place for mark in marks if (place := text.find(mark, start)) >= 0), default=len(text))


def after_block(text: str, start: int, opening: str, closing: str) -> int:
    """Return the index after the next closing mark, or that of an earlier opening mark, or the end of the text."""
    end = first_of(text, (opening, closing), start)
    return end + len(closing) if text.startswith(closing, end) else end


def skip_space(text: str, start: int) -> int:
    """Return the index of the first character from `start` on that is not white space."""
    match = _SPACE.match(text, start)
    return start if match is None else match.end()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def typed_value(text: str, key: str, name: str, tools: ToolSchemas, number: int) -> Any:
    """Return the value of argument `key` of tool `name`: JSON if the schema declares a type other than text.

    Raises:
        MalformedCall: the declared types exclude text, and the value is not JSON of a declared type.
    """
    root = parameters_of(name, tools)
    schema = property_schema(key, root)
    options = literals(schema)
    if options is not None and text.strip() in options:
        return text.strip()
    return _value(text, declared_types(schema, root), f"{key!r} of {name} (tool call {number})")


def _value(text: str, types: frozenset[str], what: str) -> Any:
    plain = text.strip()
    if "null" in types and plain == "null":
        return None
    if not types - {"string", "null"}:
        return text
    if "boolean" in types and plain.lower() in ("true", "false"):
        plain = plain.lower()
    try:
        value = _read_structure(plain, what) if types & {"array", "object"} else whole_json(plain, what)
        problem = "" if is_of_type(value, types) else f"{what} is of another type."
    except MalformedCall as error:
        value, problem = None, str(error)
    if not problem and not isinstance(value, str):
        return value
    if "string" in types:
        return text
    raise MalformedCall(f"{problem} It must be of type {' or '.join(sorted(types))}.")


def _read_structure(text: str, what: str) -> Any:
    """Read a list or an object, which models also write with a trailing comma or in Python's notation."""
    try:
        return whole_json(text, what)
    except MalformedCall:
        value = _python_value(text)
        if not isinstance(value, list | dict):
            raise
        return whole_json(json.dumps(value), what)


def _python_value(text: str) -> Any:
    """Return the value of a Python literal of JSON-compatible parts; ``None`` for any other text."""
    if text[:1] not in ("[", "{"):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return value


def whole_json(text: str, what: str) -> Any:
    """Return the JSON value of the whole `text`.

    Raises:
        MalformedCall: the text is not valid JSON, or continues after the value.
    """
    value = read_json(text, 0, what)
    if value.end != len(text):
        raise MalformedCall(f"{what} continues after its value.")
    return value.value
