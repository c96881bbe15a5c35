"""Images in a sequence of tokens: where they stand, and the rotary positions that follow from it.

A vision-language model reads an image as a grid of tokens. In the ledger these are placeholders, one after the other
in rows, all with the family's id for them; a `PlacedImage` says which image they stand for. What the policy samples is
never part of an image, even when it samples the placeholder's id.

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

from agentrl.message import ImagePart


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """An image as a model family's processor prepares it."""

    values: npt.NDArray[np.float32]
    """The processor's ``pixel_values``: float32 [patches, values of a patch]."""
    rows: int
    """Rows of the grid of tokens, which is coarser than that of patches."""
    columns: int


ImageReader: TypeAlias = Callable[[ImagePart], Patches]
"""Prepares images for a model; the same image gives the same patches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image at its place in a sequence."""

    start: int
    """Index of its first token."""
    rows: int
    columns: int
    image: ImagePart

    @property
    def tokens(self) -> int:
        """Number of tokens that stand for it."""
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.start + self.tokens

    def moved(self, tokens: int) -> PlacedImage:
        """Return the image `tokens` further on."""
        return replace(self, start=self.start + tokens)


def common_tokens(length: int, first: Sequence[PlacedImage], second: Sequence[PlacedImage]) -> int:
    """Count how many of the `length` leading ids that two sequences share mean the same in both.

    The placeholders of different images are equal: the first image that the sequences do not share whole ends it.
    """
    for one, other in zip_longest(first, second):
        start = min(image.start for image in (one, other) if image is not None)
        if start >= length:
            break
        if one != other or one.end > length:
            return start
    return length


def rope_positions(images: Sequence[PlacedImage], start: int, end: int) -> npt.NDArray[np.int64]:
    """Compute the rotary positions of tokens `start` to `end`: int64 [3, end - start], for time, height and width.

    The tokens of an image share a time and count rows and columns from there; what follows goes on after the larger of
    the two (M-RoPE: Qwen2-VL, arXiv 2409.12191, section 2.1). `images` holds all images of the sequence, in order.
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
    """Return a place as JSON types; the image by its checksum."""
    return {
        "start": placed.start,
        "rows": placed.rows,
        "columns": placed.columns,
        "checksum": placed.image.checksum,
    }


def place_from_record(record: Mapping[str, Any], images: Mapping[str, ImagePart]) -> PlacedImage:
    """Restore what `place_record` gave; `images` by checksum."""
    return PlacedImage(
        start=record["start"], rows=record["rows"], columns=record["columns"], image=images[record["checksum"]]
    )


def image_record(image: ImagePart) -> dict[str, str]:
    """Return an image as JSON types."""
    data = base64.b64encode(image.data).decode()
    return {"media_type": image.media_type, "data": data, "alternative": image.alternative}


def image_from_record(record: Mapping[str, str]) -> ImagePart:
    """Restore what `image_record` gave."""
    data = base64.b64decode(record["data"])
    return ImagePart(data=data, media_type=record["media_type"], alternative=record["alternative"])
