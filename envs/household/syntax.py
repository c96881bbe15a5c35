"""Form of the command that puts an object down."""

from __future__ import annotations

import enum


class PutSyntax(enum.StrEnum):
    """Form of the command that puts an object down; ALFWorld changed it in 0.4."""

    MOVE = "move"
    """``move apple 1 to fridge 1``"""
    PUT = "put"
    """``put apple 1 in/on fridge 1``"""

    @property
    def separator(self) -> str:
        """Text between the object and the receptacle."""
        return " to " if self is PutSyntax.MOVE else " in/on "
