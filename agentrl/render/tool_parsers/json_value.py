"""Reads one JSON value at a place in a text, strictly."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from agentrl.render.tool_parsers.contract import Malformed

_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class JsonValue:
    """A value, and the index after it in the text."""

    value: Any
    end: int


def read_json(text: str, start: int, what: str) -> JsonValue:
    """The JSON value at `start`, white space skipped before and after it.

    Raises:
        Malformed: no value stands there that is JSON, finite, and can be written as UTF-8.
    """
    begin = skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, begin)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except json.JSONDecodeError as error:
        raise Malformed(f"{what} is not valid JSON: {error.msg} at character {error.pos - begin + 1}.") from error
    except RecursionError as error:
        raise Malformed(f"{what} is not valid JSON: nested too deeply.") from error
    except ValueError as error:
        raise Malformed(f"{what} is not valid JSON: {error}.") from error
    return JsonValue(value, skip_space(text, end))


def skip_space(text: str, start: int) -> int:
    """Index of the first character from `start` on that is not white space."""
    match = _SPACE.match(text, start)
    return start if match is None else match.end()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
