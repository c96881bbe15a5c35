"""The space of observations that hold images: message content, as a Gymnasium space."""

from __future__ import annotations

import string
from typing import Any

from gymnasium.spaces import Space, Text

from agentrl.message import Content, ImagePart, TextPart


class ContentSpace(Space[Content]):
    """Tuples of `TextPart` and `ImagePart`.

    Args:
        max_length: Most characters of the texts together.
        charset: Characters of the texts; the printable ones of ASCII when left out.
    """

    def __init__(self, max_length: int, *, charset: frozenset[str] | str = string.printable) -> None:
        super().__init__(shape=None, dtype=None)
        self.text = Text(max_length, charset=frozenset(charset))

    @property
    def is_np_flattenable(self) -> bool:
        """Images have no fixed size."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> Content:
        """A random text without images."""
        return (TextPart(text=self.text.sample()),)

    def contains(self, x: Any) -> bool:
        """Parts whose texts fit."""
        if not isinstance(x, tuple) or not all(isinstance(part, TextPart | ImagePart) for part in x):
            return False
        texts = "".join(part.text for part in x if isinstance(part, TextPart))
        return not texts or bool(self.text.contains(texts))

    def __repr__(self) -> str:
        return f"ContentSpace({self.text.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ContentSpace) and self.text == other.text
