"""Plain Python values as JSON and back, so that they cross the boundary of a sandbox as data.

Every value is a list of its type and its content. Whole numbers are hexadecimal and floats exact. Objects that are not
plain data stay in their process; the other side refers to them by numbers.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

DEEPEST = 60


class NotPlainData(Exception):
    """The value cannot be encoded: it is not plain data, or too deeply nested."""


def encode(value: Any, keep: Callable[[Any], Any] | None = None, depth: int = 0) -> list[Any]:
    """Return a value as JSON types.

    Args:
        value: The value to encode.
        keep: Function that keeps an object that is not plain data and returns its number.
        depth: Nesting depth of the value.

    Raises:
        NotPlainData: the value cannot be encoded.
    """
    if depth > DEEPEST:
        raise NotPlainData("the value is too deep")
    kind = type(value)
    if value is None:
        return ["none"]
    if kind is bool:
        return ["bool", int(value)]
    if kind is int:
        return ["int", hex(value)]
    if kind is float:
        return ["float", value.hex()]
    if kind is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if kind is str:
        return ["str", value.encode("utf-8", "surrogatepass").decode("latin-1")]
    if kind in (bytes, bytearray):
        return ["bytes", bytes(value).decode("latin-1")]
    if kind in (list, tuple, set, frozenset):
        return [kind.__name__, [encode(item, keep, depth + 1) for item in value]]
    if kind is dict:
        return ["dict", [[encode(k, keep, depth + 1), encode(v, keep, depth + 1)] for k, v in value.items()]]
    plain = plainer(value)
    if plain is not value:
        return encode(plain, keep, depth + 1)
    if keep is None:
        raise NotPlainData(f"a value of type {kind.__name__} is not plain data")
    return ["object", keep(value)]


def plainer(value: Any) -> Any:
    """Convert a subclass of a plain type to that type and an iterator to a list; return other values unchanged."""
    if isinstance(value, (types.GeneratorType, map, filter, zip, range, type({}.keys()), type({}.values()))):
        return list(value)
    kinds: tuple[Any, ...] = (int, float, str, bytes, tuple, list, dict, frozenset, set)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    return value


def decode(encoded: Any, find: Callable[[int], Any] | None = None) -> Any:
    """Return the value that `encode` encoded.

    Args:
        encoded: The encoded value.
        find: Function that returns the object of a number.

    Raises:
        NotPlainData: this is not an encoded value.
    """
    match encoded:
        case ["none"]:
            return None
        case ["bool", number]:
            return bool(number)
        case ["int", text]:
            return int(text, 16)
        case ["float", text]:
            return float.fromhex(text)
        case ["complex", real, imaginary]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case ["str", text]:
            return text.encode("latin-1").decode("utf-8", "surrogatepass")
        case ["bytes", text]:
            return text.encode("latin-1")
        case ["list" | "tuple" | "set" | "frozenset" as kind, items]:
            made = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return made([decode(item, find) for item in items])
        case ["dict", pairs]:
            return {decode(key, find): decode(value, find) for key, value in pairs}
        case ["object", number] if find is not None:
            return find(number)
    raise NotPlainData("a value cannot be read")
