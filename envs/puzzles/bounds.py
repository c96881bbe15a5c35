"""Checks of numeric options of puzzles."""

from __future__ import annotations

from agentrl.errors import UsageError


def within(what: str, value: int, low: int, high: int) -> int:
    """Return the value if it is within its range.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"the option {what} is out of range", got=value, expected=f"{low} to {high}")
    return value
