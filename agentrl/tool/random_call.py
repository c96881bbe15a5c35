"""Random arguments of tools, for random play."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.tool.json_schema import as_mapping

COMMON_WORDS = ("help", "look", "wait", "yes", "no", "1", "2")
_SEEN_WORD = re.compile(r"[#@\w][\w@.#-]{1,40}")
_SEEN_WORDS = 100
"""Number of last words of an observation that may become arguments of a call."""
_DEPTH = 8
"""Maximum depth of nested arguments."""


def words_after(seen: str) -> list[str]:
    """Return words for text arguments: common ones, and the last ones of an observation."""
    return [*COMMON_WORDS, *_SEEN_WORD.findall(seen)[-_SEEN_WORDS:]]


def random_arguments(schema: Mapping[str, Any], generator: random.Random, seen: str = "") -> dict[str, Any]:
    """Draw arguments for a tool: all required ones, and each optional one in half of the cases.

    Args:
        schema: Schema of the tool in the form for chat templates, whose types, choices and bounds the values fit. Other
            rules of the schema, such as patterns, may be violated.
        generator: Source of randomness.
        seen: Latest observation; texts are words from it, or common words.
    """
    parameters = as_mapping(as_mapping(schema.get("function")).get("parameters"))
    return _object(parameters, generator, words_after(seen), as_mapping(parameters.get("$defs")), _DEPTH)


def _object(
    schema: Mapping[str, Any], generator: random.Random, words: Sequence[str], named: Mapping[str, Any], depth: int
) -> dict[str, Any]:
    required = schema.get("required") or ()
    return {
        name: _value(as_mapping(part), generator, words, named, depth)
        for name, part in as_mapping(schema.get("properties")).items()
        if name in required or (depth and generator.random() < 0.5)
    }


def _value(
    schema: Mapping[str, Any], generator: random.Random, words: Sequence[str], named: Mapping[str, Any], depth: int
) -> Any:
    """Draw a value; of alternatives, the first one."""
    schema = {**as_mapping(named.get(str(schema.get("$ref", "")).rpartition("/")[2])), **schema}
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if not depth:
        return None
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return generator.choice(schema["enum"])
    if alternatives:
        return _value(as_mapping(alternatives[0]), generator, words, named, depth - 1)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "integer" | "number":
            return _number(schema, generator)
        case "boolean":
            return generator.random() < 0.5
        case "null":
            return None
        case "array":
            items = as_mapping(schema.get("items"))
            length = max(1, int(schema.get("minItems", 1)))
            return [_value(items, generator, words, named, depth - 1) for _ in range(length)]
        case "object":
            return _object(schema, generator, words, named, depth - 1)
    return generator.choice(words)


def _number(schema: Mapping[str, Any], generator: random.Random) -> float:
    """Draw a whole number within the schema's bounds: of ten, if one bound is missing; a fraction if there is none."""
    lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    lows += [math.floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
    highs += [math.ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    low = max(lows) if lows else min([0, *highs])
    high = min(highs) if highs else low + 9
    if low <= high:
        return generator.randint(low, high)
    least, most = schema.get("minimum", low - 1), schema.get("maximum", high + 1)
    return generator.uniform(schema.get("exclusiveMinimum", least), schema.get("exclusiveMaximum", most))
