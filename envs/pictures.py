"""Small pictures of grid worlds, encoded with zlib only: the same cells give the same bytes."""

from __future__ import annotations

import enum
import functools
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.errors import UsageError
from agentrl.message import Content, ImagePart, TextPart

FIELD = 28
"""Pixels per side of a field: two of Qwen2.5-VL's patches of 14 x 14 pixels, so that a field is one token."""
KNOWN_PICTURES = 1024
"""Maximum number of cached pictures; the members of a group see the same ones."""
_BITS = 4
_PNG = b"\x89PNG\r\n\x1a\n"


class ObservationForm(enum.StrEnum):
    """Form of the observations of a grid world."""

    TEXT = "text"
    IMAGE = "image"
    """A picture whose alternative text is the observation of `TEXT`."""


class Colour(enum.IntEnum):
    """The palette."""

    WHITE = 0
    GREY = 1
    DARK_GREY = 2
    LIGHT_BLUE = 3
    BLUE = 4
    DARK_BLUE = 5
    RED = 6
    GREEN = 7
    YELLOW = 8
    BROWN = 9


_RGB: Mapping[Colour, tuple[int, int, int]] = {
    Colour.WHITE: (255, 255, 255),
    Colour.GREY: (170, 170, 170),
    Colour.DARK_GREY: (80, 80, 80),
    Colour.LIGHT_BLUE: (200, 230, 255),
    Colour.BLUE: (40, 90, 220),
    Colour.DARK_BLUE: (10, 20, 70),
    Colour.RED: (220, 40, 40),
    Colour.GREEN: (40, 160, 70),
    Colour.YELLOW: (250, 200, 30),
    Colour.BROWN: (150, 95, 45),
}


class Shape(enum.Enum):
    """Shape in the middle of a field."""

    DISC = enum.auto()
    RING = enum.auto()
    SQUARE = enum.auto()
    FRAME = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Appearance of one kind of field."""

    legend: str
    """Description in words: ``a wall is dark grey``."""
    ground: Colour
    shapes: tuple[tuple[Shape, Colour], ...] = field(default=())
    """Shapes, drawn one over the other."""


Fields = Mapping[str, Field]
"""Appearance by the letter of the field in the text."""


def observation_form(value: str, *, of: str, has_pictures: bool = True) -> ObservationForm:
    """Return the form that an option names.

    Args:
        value: As in the config.
        of: The environment.
        has_pictures: True if it can be drawn.

    Raises:
        UsageError: there is no such form, or there are no pictures of this environment.
    """
    known = [form.value for form in ObservationForm if has_pictures or form is ObservationForm.TEXT]
    if value not in known:
        raise UsageError(f"unknown observation of {of}", got=repr(value), expected=" or ".join(known))
    return ObservationForm(value)


def shows_images(*, observation: str = ObservationForm.TEXT, **_: Any) -> bool:
    """Return True if the option ``observation`` asks for pictures."""
    return observation == ObservationForm.IMAGE


def legend(fields: Fields) -> str:
    """Return a sentence that explains a picture."""
    return f"In the picture {', '.join(kind.legend for kind in fields.values())}."


def with_picture(before: str, text: str, fields: Fields) -> Content:
    """Return an observation: text, then a picture of the rows of letters in `text`.

    Args:
        before: Text before the picture; may be empty.
        text: Rows of letters, with or without spaces between them.
        fields: Appearance of each letter.
    """
    image = picture(tuple(row.replace(" ", "") for row in text.splitlines()), fields, alternative=text)
    return (TextPart(text=f"{before}\n"), image) if before else (image,)


def picture(rows: Sequence[str], fields: Fields, *, alternative: str) -> ImagePart:
    """Return a picture of a world, row by row, one letter per field."""
    return ImagePart(data=_draw(tuple(rows), tuple(fields.items())), alternative=alternative)


@functools.lru_cache(KNOWN_PICTURES)
def _draw(rows: tuple[str, ...], fields: tuple[tuple[str, Field], ...]) -> bytes:
    looks = {letter: _field_pixels(kind) for letter, kind in fields}
    return _encode(np.block([[looks[letter] for letter in row] for row in rows]))


@functools.cache
def _field_pixels(kind: Field) -> npt.NDArray[np.uint8]:
    """Return palette numbers, uint8 [FIELD, FIELD], with a line on the right and below."""
    pixels = np.full((FIELD, FIELD), kind.ground, dtype=np.uint8)
    for shape, colour in kind.shapes:
        pixels[_mask(shape)] = colour
    pixels[-1, :] = pixels[:, -1] = Colour.GREY
    return pixels


def _mask(shape: Shape) -> npt.NDArray[np.bool_]:
    """Return the pixels of a field that a shape covers, bool [FIELD, FIELD]."""
    away = np.abs(np.arange(FIELD) - (FIELD - 2) / 2)
    square, circle = np.maximum.outer(away, away), np.hypot.outer(away, away)
    masks: dict[Shape, npt.NDArray[np.bool_]] = {
        Shape.DISC: circle <= 0.25 * FIELD,
        Shape.RING: (circle <= 0.4 * FIELD) & (circle > 0.29 * FIELD),
        Shape.SQUARE: square <= 0.3 * FIELD,
        Shape.FRAME: (square <= 0.42 * FIELD) & (square > 0.34 * FIELD),
    }
    return masks[shape]


def _encode(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return a PNG file of palette numbers, four bits each (ISO/IEC 15948); the number of columns is even."""
    height, width = pixels.shape
    packed = (pixels[:, ::2] << _BITS) | pixels[:, 1::2]
    lines = np.hstack([np.zeros((height, 1), dtype=np.uint8), packed])  # each line begins with the number of its filter
    palette = bytes(value for colour in Colour for value in _RGB[colour])
    header = struct.pack(">IIBBBBB", width, height, _BITS, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return _PNG + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
