"""The front end's built files: one page for all addresses, and assets whose names contain a digest."""

from __future__ import annotations

import re
from pathlib import Path

from aiohttp import web

STATIC = Path(__file__).parent / "static"
"""Folder of the built files."""
INDEX = "index.html"
TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".ico": "image/x-icon",
    ".js": "text/javascript",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".woff2": "font/woff2",
}
"""Content types, which systems know differently; other files are not served."""
YEAR_S = 365 * 24 * 3600
_DIGEST = re.compile(r"[.-][A-Za-z0-9_-]{8,}\.\w+")
"""End of the name of a file that never changes."""
MISSING = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>agentrl view</title></head>
<body><h1>The pages of the viewer are not built</h1>
<p>This is a source checkout. Build them with <code>make viewer</code> (it needs npm), and load this page again.</p>
<p>Without them, <code>agentrl view RUN --output FILE</code> writes one page, and <code>--terminal</code> prints
episodes. The data is at <a href="/api/sources">/api/sources</a>.</p></body></html>
"""


def page() -> web.Response:
    """Return the page of all addresses."""
    try:
        text = (STATIC / INDEX).read_text(encoding="utf-8")
    except OSError:
        return web.Response(text=MISSING, content_type="text/html", status=503)
    return web.Response(text=text, content_type="text/html", headers={"Cache-Control": "no-cache"})


def asset(name: str) -> web.Response:
    """Return a built file.

    Raises:
        web.HTTPNotFound: there is none with this name.
    """
    kind = TYPES.get(Path(name).suffix)
    try:
        file = (STATIC / name).resolve()
        is_inside = file.is_relative_to(STATIC.resolve()) and file.is_file()
        data = file.read_bytes() if kind is not None and is_inside else None
    except (OSError, ValueError):  # a name with a null character, or too long
        data = None
    if data is None or kind is None:
        raise web.HTTPNotFound(text="no such file")
    cache = f"public, max-age={YEAR_S}, immutable" if _DIGEST.search(name) else "no-cache"
    return web.Response(body=data, content_type=kind, charset=_charset(kind), headers={"Cache-Control": cache})


def _charset(kind: str) -> str | None:
    return "utf-8" if kind.startswith("text/") or kind == "application/json" else None
