"""Checks the numbers among a puzzle's options."""

from __future__ import annotations

from agentrl.errors import UsageError


def within(what: str, value: int, low: int, high: int) -> int:
    """Return the value, when it lies in its range.

    Raises:
        UsageError: it does not.
    """
    if not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"the option {what} is out of range", got=value, expected=f"{low} to {high}")
    return value
