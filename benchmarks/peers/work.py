"""The episodes that all sides of a comparison play: the policy looks into cabinets until it has found a key.

This file runs in the peers' environments, too, and imports only the standard library.
"""

from __future__ import annotations

import zlib

QUESTION = "Room {}. A red key lies in one of the cabinets. Look into cabinets until you have found it, then say so."
FOUND = "I have found the red key in the last cabinet, so I stop looking here."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look into a cabinet.",
            "parameters": {
                "type": "object",
                "properties": {"cabinet": {"type": "integer", "description": "Its number."}},
                "required": ["cabinet"],
            },
        },
    }
]
"""The tool for Chat Completions."""
READY, FIGURES = "READY", "FIGURES "
"""Starts of the lines that a side prints: once it can play, and with the figures of a round."""
_THINGS = ("a mug", "two plates", "a book", "a candle", "an old map", "three coins", "a rope", "a bell")


def look(cabinet: int) -> str:
    """Look into a cabinet.

    Args:
        cabinet: Its number.
    """
    things = [_THINGS[cabinet // 8**place % 8] for place in range(3)]
    TALLY.count(cabinet)
    return f"Cabinet {cabinet} is open. In it, you see {things[0]}, {things[1]} and {things[2]}. No key is here."


class Tally:
    """Count of the calls of the tool, and a checksum of their arguments that does not depend on their order."""

    def __init__(self) -> None:
        self.calls = self.checksum = 0

    def count(self, cabinet: int) -> None:
        """Count a call."""
        self.calls += 1
        self.checksum += zlib.crc32(b"%d" % cabinet)

    def clear(self) -> None:
        """Start counting again."""
        self.calls = self.checksum = 0

    @staticmethod
    def checksum_of(cabinets: range) -> int:
        """Return the checksum of a call for each of these cabinets."""
        return sum(zlib.crc32(b"%d" % cabinet) for cabinet in cabinets)


TALLY = Tally()
"""Count of the calls in this process."""
