"""Strict readers of argument values: JSON at a place in a text, and text by the types that the tool declares."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from agentrl.json_schema import declared_types, is_of_type, literals, property_schema
from agentrl.render.tool_parsers import Malformed, ToolSchemas, parameters_of

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class JsonValue:
    """A value, and the index after it in the text."""

    value: Any
    end: int


def read_json(text: str, start: int, what: str, form: str = "") -> JsonValue:
    """Return the JSON value at `start`, white space skipped before and after it; `form` follows what was wrong with it.

    Raises:
        Malformed: no value stands there that is JSON, finite, and can be written as UTF-8.
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
    raise Malformed(f"{what} is not valid JSON: {reason}. {form}".rstrip())


def first_of(text: str, marks: Sequence[str], start: int = 0) -> int:
    """Index of the first of `marks` from `start` on; the end of the text where there is none."""
    return min((place for mark in marks if (place := text.find(mark, start)) >= 0), default=len(text))


def after_block(text: str, start: int, opening: str, closing: str) -> int:
    """Index after the next closing mark; or of the opening mark that comes before it, or the end of the text."""
    end = first_of(text, (opening, closing), start)
    return end + len(closing) if text.startswith(closing, end) else end


def skip_space(text: str, start: int) -> int:
    """Index of the first character from `start` on that is not white space."""
    match = _SPACE.match(text, start)
    return start if match is None else match.end()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def typed_value(text: str, key: str, name: str, tools: ToolSchemas, number: int) -> Any:
    """Return the value of argument `key` of tool `name`: JSON where the schema declares a type that is not text.

    Raises:
        Malformed: a value that cannot be text is not JSON of a declared type.
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
        value = _structured(plain, what) if types & {"array", "object"} else whole_json(plain, what)
        problem = "" if is_of_type(value, types) else f"{what} is of another type."
    except Malformed as error:
        value, problem = None, str(error)
    if not problem and not isinstance(value, str):
        return value
    if "string" in types:
        return text
    raise Malformed(f"{problem} It must be of type {' or '.join(sorted(types))}.")


def _structured(text: str, what: str) -> Any:
    """Return a list or an object, which models also write with a trailing comma or as Python does."""
    try:
        return whole_json(text, what)
    except Malformed:
        value = _python_value(text)
        if not isinstance(value, list | dict):
            raise
        return whole_json(json.dumps(value), what)


def _python_value(text: str) -> Any:
    """Return what a text is as a literal of Python whose parts JSON has; ``None`` where it is none."""
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
    """Return the JSON value that is all of `text`.

    Raises:
        Malformed: it is not JSON, or goes on.
    """
    value = read_json(text, 0, what)
    if value.end != len(text):
        raise Malformed(f"{what} goes on after its value.")
    return value.value
