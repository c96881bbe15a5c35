"""Reads a value that is written as plain text, by the types that the tool's schema allows for it."""

from __future__ import annotations

from typing import Any

from agentrl.render.tool_parsers.contract import Malformed, ToolSchemas
from agentrl.render.tool_parsers.json_value import read_json
from agentrl.render.tool_parsers.schema_types import json_types


def typed_value(text: str, key: str, name: str, tools: ToolSchemas, number: int) -> Any:
    """The value of argument `key` of tool `name`: text where a string is allowed, JSON otherwise.

    Raises:
        Malformed: a value that is no string is not JSON.
    """
    properties = tools[name].get("function", {}).get("parameters", {}).get("properties", {})
    return _value(text, json_types(properties.get(key, {})), f"{key!r} of {name} (tool call {number})")


def _value(text: str, types: frozenset[str], what: str) -> Any:
    if not types - {"string", "null"}:
        return None if "null" in types and text.strip().lower() in ("null", "none") else text
    plain = text.strip()
    if plain.lower() in ("true", "false", "null", "none"):
        plain = plain.lower().replace("none", "null")
    try:
        return whole_json(plain, what)
    except Malformed as problem:
        if "string" in types:
            return text
        raise Malformed(f"{problem} It must be of type {' or '.join(sorted(types))}.") from problem


def whole_json(text: str, what: str) -> Any:
    """The JSON value that is all of `text`.

    Raises:
        Malformed: it is not JSON, or goes on.
    """
    value = read_json(text, 0, what)
    if value.end != len(text):
        raise Malformed(f"{what} goes on after its value.")
    return value.value
