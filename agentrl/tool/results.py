"""Results of Python tools: awaited, and converted to JSON values and to text for the policy.

>>> as_text({"when": datetime.date(2026, 5, 1), "who": {"moss", "fern"}, (1, 2): Decimal("1.50")})
'{"when": "2026-05-01", "who": ["fern", "moss"], "(1, 2)": "1.50"}'

Every value has a text form: values that JSON does not support are written readably, and values that cannot be shown (an
image, a circular or very deep part, an object that fails) become a short notice in brackets; `as_text` and `as_json`
never raise an exception. `as_content` keeps images, for vision policies.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import datetime
import enum
import functools
import inspect
import io
import json
import math
import re
import struct
from argparse import Namespace
from collections import UserString
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    MappingView,
    Sequence,
)
from collections.abc import Set as AbstractSet
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from itertools import groupby
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, get_origin
from uuid import UUID

from agentrl.errors.foreign import DaemonThreads, call_in_thread
from agentrl.message import Content, ContentPart, ImagePart, TextPart
from agentrl.tool.schema import inner_function

MAX_AWAITED = 8
"""Maximum number of awaitables that return one another."""
_AWAITABLES = (Awaitable, Coroutine, asyncio.Future, asyncio.Task)
DEEPEST = 64
"""Maximum displayed nesting depth of lists and objects."""
MAX_PARTS = 100_000
"""Maximum number of displayed values of a result; more would not fit into a prompt."""
MAX_TEXT_CHARS = 10_000_000
"""Maximum number of characters of a text that are kept."""
MAX_INTEGER_DIGITS = 4_000
"""Maximum number of digits; Python writes at most 4,300."""
_THREADS = DaemonThreads("agentrl-tool")
_ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")
_HALF = re.compile("[\ud800-\udfff]")
_AS_STR = (datetime.timedelta, Decimal, Fraction, UUID, PurePath, complex)
_SHORT_FLOATS: Mapping[str, tuple[str, int]] = {"float32": (">f", 0), "float16": (">e", 0), "bfloat16": (">f", 16)}
"""Low-precision float formats for `struct`, and the number of trailing bits that each drops."""
_MAX_EXACT_WHOLE = 2.0**53
CUT = "[more is left out]"
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


def returns_awaitable(function: Callable[..., Any], result: Any) -> bool:
    """Return True if a function returns an awaitable, according to its kind and its type hint."""
    inner = inspect.unwrap(inner_function(function))
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(inner):
        return True
    return get_origin(result) in _AWAITABLES or result in _AWAITABLES


async def result_of(call: Callable[[], Any], what: str, *, in_loop: bool) -> Any:
    """Call a function in the event loop or in a thread, and return its final value."""
    value = call() if in_loop else await call_in_thread(_THREADS, functools.partial(_read_out, call), what)
    return await _resolve(value)


async def _resolve(value: Any) -> Any:
    """Return the final value: awaitables of any kind are awaited, and async iterators read to their end."""
    for _ in range(MAX_AWAITED):
        if isinstance(value, concurrent.futures.Future):
            value = asyncio.wrap_future(value)
        if isinstance(value, AsyncIterator):
            return await _all_parts(value)
        if not inspect.isawaitable(value):
            return value
        value = await value
    raise TypeError(f"awaiting the result returned another awaitable {MAX_AWAITED} times")


async def _all_parts(parts: AsyncIterator[Any]) -> list[Any]:
    """Read an async iterator to its end, or until it exceeds the displayed parts."""
    found: list[Any] = []
    async for part in parts:
        found.append(part)
        if len(found) > MAX_PARTS:
            break
    return found


def _read_out(call: Callable[[], Any]) -> Any:
    """Call a function; if it returns an iterator, read it to its end, which may be slow."""
    value = call()
    return as_json(value) if isinstance(value, Iterator) and not inspect.isawaitable(value) else value


def as_text(value: Any) -> str:
    """Return the text of a value: a text unchanged, anything else as JSON; lone surrogates are replaced."""
    plain = as_json(value)
    text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)
    return _HALF.sub("\ufffd", text)


def as_content(value: Any) -> Content:
    """Return an image, or a list or tuple of images and texts, as parts of a message; any other value as text.

    Images are `ImagePart` or Pillow's, which become PNG. Texts and images may be content blocks, as chat templates, TRL
    and OpenAI's clients write them: ``{"type": "text", "text": …}``, ``{"type": "image", "image": …}`` with an image or
    a ``data:`` URL, ``{"type": "image_url", "image_url": {"url": …}}``. Adjacent texts become lines.
    """
    values = value if isinstance(value, list | tuple) else [value]
    if values and all(isinstance(one, Mapping) and "type" in one for one in values):
        values = [_block_content(block) for block in values]
        if all(isinstance(one, str) for one in values):
            return as_text("\n".join(values))
    if not any(map(_is_image, values)) or not all(_is_image(v) or isinstance(v, str | TextPart) for v in values):
        return as_text(value)
    return tuple(part for is_image, found in groupby(values, _is_image) for part in _parts(is_image, found))


def _block_content(block: Mapping[str, Any]) -> Any:
    """Return the text or the image of a content block; any other mapping unchanged."""
    match block:
        case {"type": "text", "text": str(text), **others} if not others:
            return text
        case {"type": "image", "image": image} | {"type": "image_url", "image_url": {"url": image}}:
            with suppress(ValueError):  # another text, such as the address of an image, is data
                found = ImagePart.from_data_url(image) if isinstance(image, str) else image
                return found if _is_image(found) else block
    return block


def content_text(content: Content) -> str:
    """Return content as text: its parts in lines, with a notice for each image."""
    return content if isinstance(content, str) else "\n".join(map(as_text, content))


def _is_image(value: Any) -> bool:
    return isinstance(value, ImagePart) or _is_pillow_image(value)


def _is_pillow_image(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "PIL" and hasattr(value, "mode")


def _parts(are_images: bool, values: Iterable[Any]) -> Iterable[ContentPart]:
    return map(_image_part, values) if are_images else [TextPart(text="\n".join(map(as_text, values)))]


def _image_part(value: Any) -> ImagePart:
    if isinstance(value, ImagePart):
        return value
    file, size = io.BytesIO(), f"{value.width} x {value.height}, {value.mode}"
    (value if value.mode in _PNG_MODES else value.convert("RGB")).save(file, format="PNG")
    return ImagePart(data=file.getvalue(), alternative=size)


def as_json(value: Any) -> Any:
    """Convert a value to types that `json` supports; an iterator is read to its end, or to `MAX_PARTS`."""
    if value is None or isinstance(value, bool | float) or (type(value) is str and len(value) <= MAX_TEXT_CHARS):
        return value
    return _Writer().write(value, 0)


class _Writer:
    """Conversion of one result, with a count of its parts."""

    def __init__(self) -> None:
        self._parts = 0
        self._inside: set[int] = set()

    def write(self, value: Any, depth: int) -> Any:
        self._parts += 1
        if value is None or type(value) in (bool, float):
            return value
        if isinstance(value, str):
            return _text(value)
        try:
            return self._write_object(value, depth)
        except Exception as error:  # the value's own code: an iterator, a property, a serializer
            return f"[{type(value).__name__}: {type(error).__name__}]"

    def _write_object(self, value: Any, depth: int) -> Any:
        if isinstance(value, enum.Enum):
            return self.write(value.value, depth)
        if isinstance(value, int):
            return _integer(int(value))
        if isinstance(value, float):
            return float(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return _bytes_text(bytes(value))
        if isinstance(value, datetime.date | datetime.time):
            return value.isoformat()
        if isinstance(value, _AS_STR):
            return str(value)
        if isinstance(value, UserString):
            return _text(value.data)
        if isinstance(value, TextPart):
            return self.write(value.text, depth)
        if isinstance(value, ImagePart):
            return f"[image: {value.alternative or value.media_type}]"
        if isinstance(value, BaseException):
            return f"{type(value).__name__}: {value}"
        return self._write_whole(value, depth)

    def _write_whole(self, value: Any, depth: int) -> Any:
        """Convert a value with parts, or any other object."""
        if id(value) in self._inside:
            return "[circular]"
        if depth >= DEEPEST:
            return "[nested too deeply]"
        self._inside.add(id(value))
        try:
            for convert in (_array, _fields):
                if (found := convert(value)) is not value:
                    return self.write(found, depth)
            if _is_collection(value):
                return self._write_parts(value, depth)
            return _text(_ADDRESS.sub("", str(value)))
        finally:
            self._inside.discard(id(value))

    def _write_parts(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            written: dict[str, Any] = {}
            for key, part in self._limit_parts(value.items(), (CUT, None)):
                written[self._key(key, written)] = self.write(part, depth + 1)
            return written
        parts = sorted(value, key=_order) if isinstance(value, AbstractSet) else value
        return [self.write(part, depth + 1) for part in self._limit_parts(parts, CUT)]

    def _limit_parts(self, parts: Iterable[Any], notice: Any) -> Iterator[Any]:
        """Yield parts up to the limit, and then the notice if there are more."""
        for part in parts:
            if self._parts >= MAX_PARTS:
                yield notice
                return
            yield part

    def _key(self, key: Any, taken: Mapping[str, Any]) -> str:
        """Return a unique JSON key for a key of a mapping."""
        plain = self.write(key, DEEPEST - 1) if not isinstance(key, tuple) else str(key)
        text = plain if isinstance(plain, str) else json.dumps(plain)
        return text if text not in taken else f"{text} ({type(key).__name__})"


def _text(value: str) -> str:
    text = str.__str__(value)
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]} {CUT}"


def _integer(value: int) -> int | str:
    digits = int(value.bit_length() * 0.30103)
    return value if digits <= MAX_INTEGER_DIGITS else f"[a whole number of about {digits} digits]"


def _bytes_text(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    return f"[{len(value)} bytes]" if "\0" in text else _text(text)


def _order(value: Any) -> tuple[str, Any]:
    """Return a sort key for a set's values that is the same in every process: numbers by value, others by text."""
    return ("", value) if isinstance(value, int | float) else (type(value).__name__, _ADDRESS.sub("", repr(value)))


def _fields(value: Any) -> Any:
    """Return the fields of a record (a dataclass, a named tuple, a model, a namespace, a row); other values as is."""
    kind = type(value)
    if isinstance(value, type | Mapping):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, SimpleNamespace | Namespace):
        return vars(value)
    for method in ("_asdict", "model_dump", "to_dict"):
        if callable(getattr(kind, method, None)) and (method != "to_dict" or _needs_nothing(value.to_dict)):
            return getattr(value, method)()
    if hasattr(kind, "__attrs_attrs__"):
        return {field.name: getattr(value, field.name) for field in kind.__attrs_attrs__}
    if callable(getattr(kind, "keys", None)) and hasattr(kind, "__getitem__"):
        return {name: value[name] for name in value.keys()}  # noqa: SIM118 (such as a row of sqlite3: not a mapping)
    return value


def _needs_nothing(method: Callable[..., Any]) -> bool:
    """Return True if a method can be called without arguments."""
    try:
        inspect.signature(method).bind()
    except TypeError:
        return False
    except ValueError:  # written in C
        return True
    return True


def _is_collection(value: Any) -> bool:
    """Return True if a value is shown as its parts: an iterable without its own ``__str__``, or a standard one."""
    if isinstance(value, Mapping | AbstractSet | Sequence | Iterator | MappingView):
        return True
    kind = type(value)
    is_sequence = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    has_parts = hasattr(kind, "__iter__") or is_sequence
    return has_parts and not isinstance(value, type) and inspect.getattr_static(kind, "__str__") is object.__str__


def _array(value: Any) -> Any:
    """Convert an image, a table or an array, without importing its package; return other values as is.

    Images become a notice with their size, tables lists of rows, and arrays lists or numbers.
    """
    package = type(value).__module__.partition(".")[0]
    if _is_pillow_image(value):
        return f"[image: {value.width} x {value.height}, {value.mode}]"
    if package == "pandas" and hasattr(value, "to_dict"):
        return _rows(value) if hasattr(value, "columns") else value.to_dict()
    if not all(hasattr(value, name) for name in ("shape", "dtype", "tolist")):
        return value
    shape, kind = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    if len(shape) == 3 and kind == "uint8" and shape[2] in (3, 4) and min(shape[:2]) > 1:
        return f"[image: {shape[1]} x {shape[0]}, {'RGB' if shape[2] == 3 else 'RGBA'}]"
    if math.prod(shape) > MAX_PARTS:
        return f"[array: {' x '.join(map(str, shape))}, {kind}]"
    if kind.startswith(("datetime64", "timedelta64")):
        return value.astype(str).tolist()
    plain = value.tolist()
    if type(plain) is type(value):  # a scalar without an equivalent in Python, such as numpy's longdouble
        return float(value) if kind.startswith("float") else str(value)
    return _shorten_floats(plain, *_SHORT_FLOATS[kind]) if kind in _SHORT_FLOATS else plain


def _rows(table: Any) -> Any:
    """Return the rows of a pandas table; row labels other than numbers become columns."""
    is_numbered = type(table.index).__name__ == "RangeIndex"
    return (table if is_numbered else table.reset_index()).to_dict(orient="records")


def _shorten_floats(value: Any, form: str, dropped: int) -> Any:
    """Round floats of low precision to the fewest digits that identify them: 0.1, not 0.10000000149011612."""
    if isinstance(value, list):
        return [_shorten_floats(part, form, dropped) for part in value]
    if abs(value) < _MAX_EXACT_WHOLE and value.is_integer():
        return value
    bits = _bits(value, form, dropped)
    rounded = (float(f"{value:.{digits}g}") for digits in range(2, 9))
    return next((one for one in rounded if _bits(one, form, dropped) == bits), value)


def _bits(value: float, form: str, dropped: int) -> int | None:
    """Return a float's bits in a format without its last `dropped` bits; ``None`` if it is too large for it."""
    try:
        whole = int.from_bytes(struct.pack(form, value), "big")
    except OverflowError:
        return None
    if not dropped or not math.isfinite(value):
        return whole
    half = (1 << (dropped - 1)) - 1 + (whole >> dropped & 1)  # ties round to even
    return (whole + half) >> dropped
