"""Word lists of the puzzles."""

from __future__ import annotations

import functools
import importlib.resources


@functools.cache
def words_of(name: str) -> tuple[str, ...]:
    """Return the words of a list, in its order.

    Args:
        name: Name of the list's file, without extension.
    """
    text = importlib.resources.files(__package__).joinpath(f"data/{name}.txt").read_text(encoding="utf-8")
    return tuple(text.split())
