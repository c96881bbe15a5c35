"""Query parameters of a route: only known names, each given once, and errors that state the expected value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from multidict import MultiMapping

from agentrl.errors import Outcome, UsageError
from agentrl.observe.trajectory_index import EpisodeFilter

MAX_TEXT_CHARS = 1000
"""Maximum number of characters of a text parameter."""
MAX_EXACT_NUMBER = 2**53
_RANGES: Mapping[str, tuple[str, str]] = {
    "step": ("first_step", "last_step"),
    "turns": ("least_turns", "most_turns"),
    "tokens": ("least_tokens", "most_tokens"),
}
_TEXTS = {
    **{name: name for name in ("split", "environment", "task_type", "role")},
    "task": "task_id",
    "group": "group_id",
}
_FLAGS = ("success", "invalid", "truncated")
_REPEATABLE = ("outcome",)
FILTERS = (
    *(f"{name}_{end}" for name in (*_RANGES, "reward") for end in ("from", "to")),
    *(*_TEXTS, *_FLAGS, *_REPEATABLE, "running", "text"),
)
"""Parameters of `Query.filter`."""


class Query:
    """Parameters of a request.

    Args:
        values: The parameters as strings.
        known: Names of the address's parameters.

    Raises:
        UsageError: a name is unknown, or is given twice.
    """

    def __init__(self, values: MultiMapping[str], known: Sequence[str] = ()) -> None:
        self._values = values
        for name in values:
            if name not in known:
                raise _unknown(name, known)
            if name not in _REPEATABLE and len(values.getall(name)) > 1:
                got = ", ".join(values.getall(name))[:80]
                raise UsageError(f"{name} is given twice", got=got, expected="one value")

    def text(self, name: str) -> str | None:
        """Return a text; ``None`` if it is not given, or empty."""
        value = self._values.get(name)
        if value is not None and len(value) > MAX_TEXT_CHARS:
            raise UsageError(
                f"{name} is too long", got=f"{len(value)} characters", expected=f"at most {MAX_TEXT_CHARS}"
            )
        return value or None

    def texts(self, name: str) -> list[str]:
        """Return the texts of a repeatable parameter."""
        return [value for value in self._values.getall(name, []) if value]

    def required_text(self, name: str) -> str:
        """Return a text that must be given."""
        value = self.text(name)
        if value is None:
            raise UsageError(f"{name} is missing", expected=f"?{name}=…")
        return value

    def integer(
        self, name: str, default: int | None = None, *, least: int = 0, most: int = MAX_EXACT_NUMBER
    ) -> int | None:
        """Return a whole number within bounds."""
        value = self.text(name)
        if value is None:
            return default
        try:
            number = int(value) if len(value) < 20 else MAX_EXACT_NUMBER + 1
        except ValueError:
            number = MAX_EXACT_NUMBER + 1
        if not least <= number <= most:
            raise UsageError(f"{name} is not valid", got=value[:80], expected=f"a whole number from {least} to {most}")
        return number

    def number(self, name: str) -> float | None:
        """Return a finite number."""
        value = self.text(name)
        if value is None:
            return None
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise UsageError(f"{name} is not valid", got=value[:80], expected="a finite number")
        return number

    def flag(self, name: str) -> bool | None:
        """Return a boolean."""
        value = self.text(name)
        if value not in (None, "true", "false"):
            raise UsageError(f"{name} is not valid", got=value[:80], expected="true or false")
        return None if value is None else value == "true"

    def filter(self) -> EpisodeFilter:
        """Return the conditions for episodes."""
        given: dict[str, Any] = {
            key: self.integer(f"{name}_{end}")
            for name, keys in _RANGES.items()
            for end, key in zip(("from", "to"), keys, strict=True)
        }
        given |= {key: self.text(name) for name, key in _TEXTS.items()} | {name: self.flag(name) for name in _FLAGS}
        outcomes, is_running = self.texts("outcome"), self.flag("running")
        if unknown := [one for one in outcomes if one not in {outcome.value for outcome in Outcome}]:
            raise UsageError("outcome is not valid", got=unknown[0][:80], expected=", ".join(Outcome))
        return EpisodeFilter(
            **given,
            complete=not is_running,
            outcomes=tuple(Outcome(one) for one in outcomes) or None,
            least_reward=self.number("reward_from"),
            most_reward=self.number("reward_to"),
            text=self.text("text"),
        )


def _unknown(name: str, known: Sequence[str]) -> UsageError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return UsageError(
        "the address has no such parameter",
        got=name[:80],
        expected=", ".join(sorted(known)) or "none",
        hint=f"did you mean {near[0]}?" if near else None,
    )
