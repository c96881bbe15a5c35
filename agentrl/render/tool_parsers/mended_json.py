"""Reader of JSON with typical mistakes of models: missing or stray closing brackets, trailing commas, bare line breaks.

Only punctuation is repaired. A string that was cut off is not closed, because its end is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.render.tool_parsers import MalformedCall
from agentrl.render.tool_parsers.values import read_json, skip_space
from agentrl.tool.schema import DEEPEST

UNCLOSED = "missing closing brackets"
STRAY = "a closing bracket that closes nothing"
COMMA = "a trailing comma"
LINE_BREAK = "a line break inside a string"
_CLOSING = {"{": "}", "[": "]"}
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


@dataclass(frozen=True, slots=True)
class MendedJson:
    """Value with the index after it in the text, and the repairs."""

    value: Any
    end: int
    mends: tuple[str, ...] = ()


def read_mended(text: str, start: int, what: str, *, ends: Sequence[str] = (), is_whole: bool = True) -> MendedJson:
    """Read the JSON value at `start` with repairs if needed, and skip white space after it.

    Args:
        text: Text of the answer.
        start: Index of the value; white space before it is skipped.
        what: Name of the value in problems.
        ends: Marks that end a value with missing closing brackets, like the end of the text.
        is_whole: The text was not cut, so its end may end such a value.

    Raises:
        MalformedCall: there is no value, or it cannot be repaired.
    """
    begin = skip_space(text, start)
    try:
        found = read_json(text, begin, what)
        return MendedJson(found.value, found.end)
    except MalformedCall:
        if text[begin : begin + 1] not in _CLOSING:
            raise
        mended = _JsonRepair(text, begin, ends)
        if mended.end is None or (mended.is_cut and not is_whole):
            raise
    return MendedJson(read_json("".join(mended.written), 0, what).value, skip_space(text, mended.end), mended.mends)


@dataclass(slots=True)
class _JsonRepair:
    """Scan of one value, which builds the repaired text character by character."""

    text: str
    begin: int
    ends: Sequence[str]
    written: list[str] = field(default_factory=list)
    end: int | None = None
    """Index after the value; ``None`` if it cannot be repaired."""
    is_cut: bool = False
    """True if the end of the text ended the value."""
    mends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        stack: list[str] = []
        index, text = self.begin, self.text
        while index < len(text):
            letter = text[index]
            if stack and self.ends and any(text.startswith(mark, index) for mark in self.ends):
                break
            if letter == '"':
                index = self._string(index)
                if index < 0:
                    return
                continue
            if letter in _CLOSING:
                stack.append(_CLOSING[letter])
                if len(stack) > DEEPEST:
                    return
            elif letter in ("}", "]", ")"):
                if letter not in stack:
                    self._note(STRAY)
                    index += 1
                    continue
                while stack[-1] != letter:
                    self._close(stack.pop(), UNCLOSED)
                stack.pop()
                self._without_comma()
            self.written.append(letter)
            index += 1
            if not stack:
                self.end = index
                return
        while stack:
            self._close(stack.pop(), UNCLOSED)
        self.end, self.is_cut = index, index == len(text)

    def _string(self, index: int) -> int:
        """Copy the string that begins at an index; return the index after it, or -1 if it has no end."""
        self.written.append('"')
        index += 1
        while index < len(self.text):
            letter = self.text[index]
            if letter == "\\":
                self.written.append(self.text[index : index + 2])
                index += 2
                continue
            if letter in _ESCAPES:
                self._note(LINE_BREAK)
            self.written.append(_ESCAPES.get(letter, letter))
            index += 1
            if letter == '"':
                return index
        return -1

    def _close(self, bracket: str, mend: str) -> None:
        self._without_comma()
        self.written.append(bracket)
        self._note(mend)

    def _without_comma(self) -> None:
        last = len(self.written) - 1
        while last >= 0 and self.written[last].isspace():
            last -= 1
        if last >= 0 and self.written[last] == ",":
            del self.written[last:]
            self._note(COMMA)

    def _note(self, mend: str) -> None:
        if mend not in self.mends:
            self.mends = (*self.mends, mend)
