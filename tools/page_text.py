"""Text of an HTML page: headings, paragraphs, lists and links; no scripts, styles or pictures."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.parse import urljoin

_SILENT = frozenset({"script", "style", "noscript", "template", "svg", "head", "iframe"})
_BLOCKS = frozenset(
    {"p", "div", "section", "article", "header", "footer", "main", "nav", "aside", "ul", "ol", "table", "tr", "br"}
    | {"blockquote", "pre", "figure", "form", "dl", "dt", "dd", "hr"}
)
_HEADINGS = {f"h{level}": f"{'#' * level} " for level in range(1, 7)}


def page_text(html: str, url: str) -> str:
    r"""Return the visible text of a page, with the addresses of its links.

    >>> page_text("<h1>Ferns</h1><p>They <b>like</b> <a href='c'>shade</a>.<style>x</style>", "https://example.org/b/")
    '# Ferns\n\nThey like [shade](https://example.org/b/c).'

    Args:
        html: The page.
        url: Its address, to resolve relative links.
    """
    reader = _Reader(url)
    reader.feed(html)
    reader.close()
    text = "".join(reader.parts)
    text = re.sub(r"[ \t]*\n[ \t]*", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


class _Reader(HTMLParser):
    def __init__(self, url: str) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._url = url
        self._silent: list[str] = []
        self._links: list[str | None] = []
        self._exact = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in _SILENT:
            self._silent.append(tag)
        elif tag in _HEADINGS:
            self.parts.append(f"\n\n{_HEADINGS[tag]}")
        elif tag == "li":
            self.parts.append("\n- ")
        elif tag in ("td", "th"):
            self.parts.append(" | ")
        elif tag == "a":
            self._begin_link(dict(attributes).get("href"))
        elif tag in _BLOCKS:
            self.parts.append("\n" if tag in ("br", "tr") else "\n\n")
        self._exact += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in _SILENT:
            if tag in self._silent:
                del self._silent[self._silent.index(tag) :]
        elif tag == "a" and self._links:
            href = self._links.pop()
            self.parts.append(f"]({href})" if href else "")
        elif tag in _HEADINGS or (tag in _BLOCKS and tag != "br"):
            self.parts.append("\n\n" if tag != "tr" else "\n")
        self._exact = max(0, self._exact - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(data if self._exact else re.sub(r"\s+", " ", data))

    def _begin_link(self, href: str | None) -> None:
        target = None if href is None or href.startswith(("#", "javascript:")) else urljoin(self._url, href)
        self._links.append(target)
        if target:
            self.parts.append("[")
