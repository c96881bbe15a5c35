"""Comparison of a value from a sandbox with the right one, without decoding it: text is compared with text."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from .inside.values import NotPlainData, decode, encode

_LONG = 4000
"""Maximum characters of an encoded value that is shown."""
_ORDERED = ("list", "tuple")
_SETS = ("set", "frozenset")


def is_same(encoded: Any, expected: Any) -> bool:
    """Return True if an encoded value equals `expected` in Python's sense: 1, 1.0 and True are equal.

    Args:
        encoded: An untrusted message from a sandbox.
        expected: A plain value.
    """
    try:
        return _digest(encoded) == _digest(encode(expected))
    except (NotPlainData, ValueError, TypeError, OverflowError, RecursionError):
        return False


def show(encoded: Any, most: int = 200) -> str:
    """Return the `repr` of an encoded value, cut to `most` characters."""
    if len(json.dumps(encoded)) > _LONG:
        return "a long value"
    try:
        text = repr(decode(encoded))
    except (NotPlainData, ValueError, TypeError, OverflowError, RecursionError):
        return "a value that cannot be shown"
    return text if len(text) <= most else f"{text[:most]}…"


def _digest(encoded: Any) -> str:
    """Return a digest of fixed length, so that deep values stay cheap; untrusted values are never hashed by Python."""
    return hashlib.sha256(json.dumps(_plain(encoded)).encode()).hexdigest()


def _plain(encoded: Any) -> Any:
    """Return a form that is the same for equal values: sorted sets and dictionaries, whole floats as whole numbers."""
    match encoded:
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
    raise NotPlainData("a value cannot be read")
