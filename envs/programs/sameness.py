"""True if a value that a sandbox told is the right one, without making it: text is compared with text."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from .inside.values import Untold, decode, encode

_LONG = 4000
"""Characters of a told value from which it is not shown."""
_ORDERED = ("list", "tuple")
_SETS = ("set", "frozenset")


def is_same(told: Any, expected: Any) -> bool:
    """Return True if a told value is equal to `expected`, as Python sees it: 1, 1.0 and True are.

    Args:
        told: What came out of a sandbox, whatever it is.
        expected: A plain value.
    """
    try:
        return _digest(told) == _digest(encode(expected))
    except (Untold, ValueError, TypeError, OverflowError, RecursionError):
        return False


def show(told: Any, most: int = 200) -> str:
    """A told value as Python writes it, cut to `most` characters."""
    if len(json.dumps(told)) > _LONG:
        return "a long value"
    try:
        text = repr(decode(told))
    except (Untold, ValueError, TypeError, OverflowError, RecursionError):
        return "a value that cannot be shown"
    return text if len(text) <= most else f"{text[:most]}…"


def _digest(told: Any) -> str:
    """Of a fixed length, so that deep values stay cheap; nothing told is ever hashed by Python itself."""
    return hashlib.sha256(json.dumps(_plain(told)).encode()).hexdigest()


def _plain(told: Any) -> Any:
    """The same for all encodings of equal values: sets and dictionaries sorted, whole floats whole numbers."""
    match told:
        case ["none"]:
            return None
        case ["bool" | "int" as kind, number]:
            return hex(int(number, 16) if kind == "int" else int(bool(number)))
        case ["float", text]:
            value = float.fromhex(text)
            return hex(int(value)) if value.is_integer() else value.hex()
        case ["complex", str(real), str(imaginary)]:
            return ["complex", float.fromhex(real).hex(), float.fromhex(imaginary).hex()]
        case ["str" | "bytes" as kind, str(text)]:
            return [kind, text]
        case [str(kind), list(items)] if kind in _ORDERED:
            return [kind, [_plain(item) for item in items]]
        case [str(kind), list(items)] if kind in _SETS:
            return ["set", sorted({_digest(item) for item in items})]
        case ["dict", list(pairs)]:
            return ["dict", sorted([_digest(key), _digest(value)] for key, value in pairs)]
    raise Untold("a value cannot be read")
