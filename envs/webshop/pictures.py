"""Pictures of products, where the catalogue names a file on this machine. Nothing is fetched from the web."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from agentrl.message import ImagePart

MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
"""Formats that are shown, by the end of the file's name."""
_FILE = "file://"
KNOWN_PICTURES = 256


def shows_pictures(*, pictures: bool = False, **_: Any) -> bool:
    """Return True if the environment shows pictures under its options."""
    return pictures


@functools.lru_cache(KNOWN_PICTURES)
def picture_of(address: str, folder: Path, title: str) -> ImagePart | None:
    """Return the picture at an address; ``None`` when it is no file here, or of another format.

    Args:
        address: As the catalogue has it: a path, which may be relative to `folder`, or a URL.
        folder: Of the catalogue.
        title: Of the product, for the alternative text.
    """
    if not address or ("://" in address and not address.startswith(_FILE)):
        return None
    path = folder / address.removeprefix(_FILE)
    media_type = MEDIA_TYPES.get(path.suffix.lower())
    if media_type is None or not path.is_file():
        return None
    return ImagePart(data=path.read_bytes(), media_type=media_type, alternative=f"[picture of {title}]")
