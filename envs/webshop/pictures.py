"""Pictures of products for which the catalogue names a file on this machine; nothing is downloaded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from agentrl.message import ImagePart

MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
"""Supported formats by file extension."""
_FILE = "file://"
KNOWN_PICTURES = 256


def shows_pictures(*, pictures: bool = False, **_: Any) -> bool:
    """Return True if the options ask for pictures."""
    return pictures


@functools.lru_cache(KNOWN_PICTURES)
def picture_of(address: str, folder: Path, title: str) -> ImagePart | None:
    """Return the picture at an address; ``None`` if it is not a local file of a supported format.

    Args:
        address: Address in the catalogue: a path, which may be relative to `folder`, or a URL.
        folder: Folder of the catalogue.
        title: Title of the product, for the alternative text.
    """
    if not address or ("://" in address and not address.startswith(_FILE)):
        return None
    path = folder / address.removeprefix(_FILE)
    media_type = MEDIA_TYPES.get(path.suffix.lower())
    if media_type is None or not path.is_file():
        return None
    return ImagePart(data=path.read_bytes(), media_type=media_type, alternative=f"[picture of {title}]")
