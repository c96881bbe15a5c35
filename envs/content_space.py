"""Gymnasium space of message content: observations that contain images."""

from __future__ import annotations

import string
from typing import Any

from gymnasium.spaces import Space, Text

from agentrl.message import Content, ImagePart, TextPart


class ContentSpace(Space[Content]):
    """Tuples of `TextPart` and `ImagePart`.

    Args:
        max_length: Maximum number of characters of all texts together; any characters are allowed.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__(shape=None, dtype=None)
        self.max_length = max_length
        self._text = Text(max_length, charset=string.printable)

    @property
    def is_np_flattenable(self) -> bool:
        """False: images have no fixed size."""
        return False

    def seed(self, seed: Any = None) -> Any:
        """Seed the generator of samples."""
        return self._text.seed(seed)

    def sample(self, mask: Any = None, probability: Any = None) -> Content:
        """Return a random text without images."""
        return (TextPart(text=self._text.sample()),)

    def contains(self, x: Any) -> bool:
        """Return True for a tuple of parts whose texts are not too long."""
        if not isinstance(x, tuple) or not all(isinstance(part, TextPart | ImagePart) for part in x):
            return False
        return sum(len(part.text) for part in x if isinstance(part, TextPart)) <= self.max_length

    def __repr__(self) -> str:
        return f"ContentSpace({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ContentSpace) and self.max_length == other.max_length
