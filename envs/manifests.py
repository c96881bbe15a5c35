"""Manifests: the splits of an environment as shipped data, with checksums that tests compare."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Iterable
from typing import Any


def load_manifest(package: str) -> dict[str, Any]:
    """Return the manifest in a package's folder ``data``."""
    text = importlib.resources.files(package).joinpath("data/manifest.json").read_text(encoding="utf-8")
    manifest: dict[str, Any] = json.loads(text)
    return manifest


def checksum(texts: Iterable[str]) -> str:
    """Return the SHA-256 of texts, one per line."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()
