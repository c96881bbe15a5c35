"""Images for vision-language models: patches, and placeholder tokens in the text."""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from agentrl.errors import EnvironmentFailure, LedgerError, boundary
from agentrl.message import ImagePart, Message
from agentrl.message.image import Patches, PlacedImage

if TYPE_CHECKING:
    from transformers.image_processing_utils import BaseImageProcessor

KNOWN_IMAGES = 256
"""Maximum number of cached images; the renderer, the engine and the trainer read the same observation."""


class ImageProcessor:
    """Image processor of a model, with a cache.

    Args:
        processor: Processor that converts an image to ``pixel_values`` and ``image_grid_thw`` (Qwen2.5-VL, Qwen3-VL).
        pad_id: Placeholder token that the chat template writes once per image.
    """

    def __init__(self, processor: BaseImageProcessor, *, pad_id: int) -> None:
        self.processor = processor
        self.pad_id = pad_id
        self._prepare = functools.lru_cache(KNOWN_IMAGES)(self._read)

    def __call__(self, image: ImagePart) -> Patches:
        """Return the patches of an image.

        Raises:
            EnvironmentFailure: the image cannot be read.
        """
        return self._prepare(image)

    def place(self, image: ImagePart, start: int) -> PlacedImage:
        """Return an image whose tokens begin at `start`.

        Raises:
            EnvironmentFailure: the image cannot be read.
        """
        patches = self(image)
        return PlacedImage(start=start, rows=patches.rows, columns=patches.columns, image=image)

    def _read(self, image: ImagePart) -> Patches:
        with boundary(EnvironmentFailure, f"reading an image of {len(image.data)} bytes ({image.media_type})"):
            found = self.processor(images=[read_pixels(image.data)], return_tensors="pt")
        _, rows, columns = (int(size) for size in found["image_grid_thw"][0])
        merge = int(self.processor.merge_size)
        values = np.ascontiguousarray(found["pixel_values"].numpy(), dtype=np.float32)
        return Patches(values=values, rows=rows // merge, columns=columns // merge)


def read_pixels(data: bytes) -> Image.Image:
    """Return an encoded image as RGB, as viewers and vLLM show it: turned as its EXIF data say, and on white.

    Raises:
        OSError: it is not an image.
    """
    opened: Image.Image = Image.open(io.BytesIO(data))
    with suppress(OSError, SyntaxError, ValueError, TypeError, LookupError, struct.error):  # broken EXIF data
        opened = ImageOps.exif_transpose(opened)
    if opened.mode not in ("RGBA", "LA", "PA") and "transparency" not in opened.info:
        return opened.convert("RGB")
    layer, page = opened.convert("RGBA"), Image.new("RGB", opened.size, "white")
    page.paste(layer, mask=layer.getchannel("A"))
    return page


def images_of(messages: Sequence[Message]) -> list[ImagePart]:
    """Return the images of messages, in order."""
    contents = [message.content for message in messages if not isinstance(message.content, str)]
    return [part for content in contents for part in content if isinstance(part, ImagePart)]


def place_images(ids: Sequence[int], images: Sequence[ImagePart], processor: ImageProcessor) -> list[PlacedImage]:
    """Return the images with their positions after each placeholder in `ids` is repeated for its image's tokens.

    Raises:
        LedgerError: the numbers of placeholders and images differ.
        EnvironmentFailure: an image cannot be read.
    """
    places = [index for index, token in enumerate(ids) if token == processor.pad_id]
    if len(places) != len(images):
        raise LedgerError(
            "the rendered messages do not have one placeholder for each image",
            got=f"{len(places)} placeholders for {len(images)} images",
            expected="a chat template that shows every image once",
        )
    placed: list[PlacedImage] = []
    for index, image in zip(places, images, strict=True):
        added = sum(earlier.tokens - 1 for earlier in placed)
        placed.append(processor.place(image, index + added))
    return placed


def counts(length: int, placed: Sequence[PlacedImage]) -> Iterator[int]:
    """Yield how often each of `length` tokens is repeated when the placeholders of `placed` are expanded."""
    added, following = 0, 0
    for index in range(length):
        count = 1
        if following < len(placed) and placed[following].start == index + added:
            count = placed[following].tokens
            added, following = added + count - 1, following + 1
        yield count
