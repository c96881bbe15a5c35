"""Images in a sequence of tokens: their locations and rotary positions.

A vision-language model reads an image as a grid of tokens. In the ledger these are consecutive placeholders, row by
row, all with the family's placeholder id; a `PlacedImage` identifies their image. Sampled tokens are never part of an
image, even with the placeholder's id.

>>> image = PlacedImage(start=2, rows=2, columns=3, image=ImagePart(data=b""))
>>> image.end
8
>>> rope_positions([image], 0, 10).tolist()
[[0, 1, 2, 2, 2, 2, 2, 2, 5, 6], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]]
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from agentrl.message.message import ImagePart

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Supported formats, by Pillow's names. Others are rejected: reading EPS would run its program in Ghostscript."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """An image that a model family's processor has prepared."""

    values: npt.NDArray[np.float32]
    """The processor's ``pixel_values``: float32 [patches, values of a patch]."""
    rows: int
    """Rows in the grid of tokens, which is coarser than the grid of patches."""
    columns: int


ImageReader: TypeAlias = Callable[[ImagePart], Patches]
"""Image processor of a model, which is deterministic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image at its place in a sequence."""

    start: int
    """Index of the first token."""
    rows: int
    columns: int
    image: ImagePart

    @property
    def tokens(self) -> int:
        """Number of tokens of the image."""
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.start + self.tokens

    def shift(self, tokens: int) -> PlacedImage:
        """Return the image at an index that is greater by `tokens`."""
        return replace(self, start=self.start + tokens)


def common_tokens(length: int, first: Sequence[PlacedImage], second: Sequence[PlacedImage]) -> int:
    """Return how many of the `length` common leading ids of two sequences also have equal images.

    Placeholders of different images have equal ids, so the common prefix ends before the first image that differs or is
    not entirely in both sequences.
    """
    for one, other in zip_longest(first, second):
        start = min(image.start for image in (one, other) if image is not None)
        if start >= length:
            break
        if one != other or one.end > length:
            return start
    return length


def rope_positions(images: Sequence[PlacedImage], start: int, end: int) -> npt.NDArray[np.int64]:
    """Return the rotary positions of tokens `start` to `end`: int64 [3, end - start], for time, height and width.

    The tokens of an image share a time, from which rows and columns are counted; later tokens continue after the larger
    of the two numbers (M-RoPE: Qwen2-VL, arXiv 2409.12191, section 2.1). `images` holds all images of the sequence, in
    order.
    """
    positions = np.tile(np.arange(start, end, dtype=np.int64), (3, 1))
    saved = 0
    for image in images:
        if image.start >= end:
            break
        first, last = max(image.start, start), max(min(image.end, end), start)
        index = np.arange(first, last) - image.start
        inside = slice(first - start, last - start)
        positions[:, inside] = image.start - saved
        positions[1, inside] += index // image.columns
        positions[2, inside] += index % image.columns
        positions[:, last - start :] -= image.tokens - max(image.rows, image.columns)
        saved += image.tokens - max(image.rows, image.columns)
    return positions


def place_record(placed: PlacedImage) -> dict[str, Any]:
    """Return a placed image as JSON types, with the image's checksum."""
    return {"start": placed.start, "rows": placed.rows, "columns": placed.columns, "checksum": placed.image.checksum}


def place_from_record(record: Mapping[str, Any], images: Mapping[str, ImagePart]) -> PlacedImage:
    """Restore a placed image from `place_record`; `images` are given by checksum."""
    return PlacedImage(
        start=record["start"], rows=record["rows"], columns=record["columns"], image=images[record["checksum"]]
    )


def image_record(image: ImagePart) -> dict[str, str]:
    """Return an image as JSON types."""
    data = base64.b64encode(image.data).decode()
    return {"media_type": image.media_type, "data": data, "alternative": image.alternative}


def image_from_record(record: Mapping[str, str]) -> ImagePart:
    """Restore an image from `image_record`."""
    data = base64.b64decode(record["data"])
    return ImagePart(data=data, media_type=record["media_type"], alternative=record["alternative"])
