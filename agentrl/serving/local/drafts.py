"""Guesses of the next tokens of a sequence, from its earlier tokens (prompt lookup).

Agents repeat themselves: the syntax of a tool call, names of files, an observation that is quoted. A draft is what
followed the last occurrence of the sequence's latest tokens. The engine computes the draft in the same forward pass as
the token before it, and samples at each position with the random number that this position has anyway. Tokens are
accepted as long as the sampled one equals the guessed one, so answers are those of decoding one token at a time, up to
rounding (Leviathan et al.: Fast inference from transformers via speculative decoding, 2023, with a draft that has all
the probability).
"""

from __future__ import annotations

from dataclasses import dataclass

MATCHED = (4, 3, 2)
"""Numbers of latest tokens whose earlier occurrence is looked up, one after another."""
WINDOW_TOKENS = 512
"""Number of guessed tokens after which their acceptance is judged."""
MIN_ACCEPTANCE = 0.35
"""Share of guessed tokens below which guessing pauses."""
PAUSE_TOKENS = 8192
"""Number of sampled tokens for which guessing pauses."""


def look_up(text: str, most: int) -> list[int]:
    """Return at most `most` tokens that followed the last earlier occurrence of a sequence's latest tokens.

    Args:
        text: The sequence, as one character per token id.
        most: Maximum number of tokens.
    """
    for size in MATCHED:
        found = text.rfind(text[-size:], 0, len(text) - 1)
        if found >= 0:
            return [ord(character) for character in text[found + size : found + size + most]]
    return []


@dataclass(slots=True)
class DraftGate:
    """Decides whether guessing pays, by the share of guessed tokens that was accepted.

    A rejected token costs a token's computation. Decisions depend on the tokens alone, and start anew with new weights,
    so that runs are reproducible.
    """

    drafted: int = 0
    """Number of guessed tokens."""
    accepted: int = 0
    """Number of guessed tokens that were sampled."""
    _window_drafted: int = 0
    _window_accepted: int = 0
    _pause: int = 0

    @property
    def is_open(self) -> bool:
        """True if tokens are guessed now."""
        return self._pause <= 0

    def record(self, drafted: int, accepted: int, sampled: int) -> None:
        """Record one answer's part in a step: its guessed, accepted and sampled tokens."""
        self._pause -= sampled
        self.drafted += drafted
        self.accepted += accepted
        self._window_drafted += drafted
        self._window_accepted += accepted
        if self._window_drafted >= WINDOW_TOKENS:
            if self._window_accepted < MIN_ACCEPTANCE * self._window_drafted:
                self._pause = PAUSE_TOKENS
            self._window_drafted = self._window_accepted = 0

    def restart(self) -> None:
        """Judge from the beginning, because the weights have changed."""
        self._window_drafted = self._window_accepted = self._pause = 0
