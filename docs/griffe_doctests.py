"""Extension of griffe that shows doctests in docstrings as code; Markdown would read ``>>>`` as a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^(?:>>> .*\n?)(?:.+\n?)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """Return a docstring whose doctests are fenced code blocks; each ends at an empty line."""
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", docstring)


class FencedDoctests(griffe.Extension):
    """Extension that changes the docstrings of all objects."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the doctests of an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
