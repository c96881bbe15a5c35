"""The built pages are those of their sources, and need nothing from the network."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from agentrl.viewer.server import STATIC, TYPES

FRONTEND = Path(__file__).parents[2] / "agentrl" / "viewer" / "frontend"


def test_the_pages_are_built_from_these_sources() -> None:
    sources = [file for file in (FRONTEND / "src").rglob("*") if file.is_file()]
    files = [*sources, FRONTEND / "build.mjs", FRONTEND / "package-lock.json"]
    checksum = hashlib.sha256()
    for name, file in sorted((file.relative_to(FRONTEND).as_posix(), file) for file in files):
        checksum.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    built = (STATIC / "sources.txt").read_text().strip()
    assert checksum.hexdigest() == built, "build the pages: make viewer"


def test_the_pages_load_only_files_of_the_viewer() -> None:
    page = (STATIC / "index.html").read_text()
    names = re.findall(r'(?:src|href)="\./([^"]+)"', page)
    assert {"app.js", "app.css"} <= set(names)
    assert all((STATIC / name).is_file() for name in names)
    assert all(file.suffix in TYPES for file in STATIC.iterdir())
    style = (STATIC / "app.css").read_text()
    assert not re.findall(r"url\((?!.?data:)|@import", style)
