"""Reading of an MCP server's standard output: the messages in its lines, and texts that cannot be read.

The protocol allows one message per line and nothing else. Servers also write messages over several lines, batches,
several messages on a line, byte order marks, and their log.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_SHOWN = 200
"""Maximum number of characters of a line that a message quotes."""
_BYTE_ORDER_MARK = codecs.BOM_UTF8.decode()
_OPENING = re.compile(r'\s*(?:\{\s*(?:".*)?|\[\s*(?:\{.*)?)', re.DOTALL)
"""Pattern of the first line of a message, or of a batch, that has several."""
_OBJECT = re.compile(r"(?:\[\s*)?\{")
_TOKENS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
_MEMBER = re.compile(r"""["']jsonrpc["']""")
_METHOD = re.compile(r"""["']method["']""")
_ID = re.compile(r"""[^{]*\{[^{}\[\]]*?["']id["']\s*:\s*["']?([\w-]+)""")
"""Pattern of a message up to its own id, before its result."""
_EMBEDDED = re.compile(r'\{[^{}]*"jsonrpc"')
_FRAME = re.compile(r"(?:^|\})\s*content-length:\s*\d+\s*$", re.IGNORECASE)
"""Pattern of the header of a message as language servers write it, also after a message without a line break."""
_DECODER = json.JSONDecoder(strict=False)
"""Decoder that accepts line breaks in texts, because some servers do not escape them."""
_PAST_TEXT = "\ufeff\ufffd\0 \t\r\n"
"""Characters before the first bracket of a text in another encoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableText:
    """Text that a server wrote as an answer, but that cannot be read."""

    problem: str
    """Description: its lines, what is wrong with it, and its beginning."""
    request_id: str | None
    """Id of the request that it answers, as text; ``None`` if it is not known."""


class OutputLines:
    """Reader of a server's lines.

    Args:
        report: Called with a description of each text that belongs to no answer, such as a line of a log.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._number = 0
        self._first = self._last = 0
        """Numbers of the first and the last line of the text that was read last."""
        self._open: list[str] = []
        """Lines of a message that has not ended."""
        self._depth, self._in_text = 0, False

    @property
    def is_open(self) -> bool:
        """True if a message has not ended."""
        return bool(self._open)

    @property
    def is_batch(self) -> bool:
        """True within a batch over several lines: a line that is a message may then be a part of it."""
        return self.is_open and self._open[0].lstrip().startswith("[")

    def skip(self) -> list[dict[str, Any] | UnreadableText]:
        """Count a line that the caller reads as a message, and give up the text before it, if that has not ended."""
        self._number += 1
        return self.give_up()

    def add(self, line: str) -> list[dict[str, Any] | UnreadableText]:
        """Add a line; return the messages that it completes, as JSON objects, and texts that cannot be read."""
        self._number += 1
        line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line.strip() and not self._in_text:
            return []
        if self._open:
            return self._continue(line)
        self._first = self._last = self._number
        if _FRAME.search(line):
            problem = "it frames messages as language servers do; expected one message per line"
            return [UnreadableText(problem=self._described(line, problem), request_id=None)]
        try:
            return self._messages(_values(line), line)
        except (ValueError, RecursionError) as error:
            if _OPENING.fullmatch(line):
                self._append(line)
                if self._depth > 0:
                    return []
                self._reset()
            return self._refuse(line, error)

    def give_up(self) -> list[dict[str, Any] | UnreadableText]:
        """Stop waiting for the end of a message."""
        text = self._reset()
        return self._refuse(text, ValueError("its end is missing")) if text else []

    def _continue(self, line: str) -> list[dict[str, Any] | UnreadableText]:
        if not self.is_batch and (found := self._whole_message(line)) is not None:
            given_up = self.give_up()
            self._first = self._last = self._number
            return [*given_up, found]
        self._append(line)
        return self._close() if self._depth <= 0 else []

    def _whole_message(self, line: str) -> dict[str, Any] | None:
        """Return the message that a line is, within a message that has not ended; ``None`` if it is none."""
        if not line.startswith("{"):
            return None
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return value if _is_message(value) else None

    def _append(self, line: str) -> None:
        self._open.append(line)
        self._last = self._number
        for token in _TOKENS.findall(line):
            if token == '"':
                self._in_text = not self._in_text
            elif not self._in_text:
                self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token, 0)

    def _reset(self) -> str:
        text = "\n".join(self._open)
        self._open, self._depth, self._in_text = [], 0, False
        return text

    def _close(self) -> list[dict[str, Any] | UnreadableText]:
        text = self._reset()
        try:
            return self._messages(_values(text), text)
        except (ValueError, RecursionError) as error:
            return self._refuse(text, error)

    def _messages(self, values: list[Any], text: str) -> list[dict[str, Any] | UnreadableText]:
        flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
        found = [one for one in flat if isinstance(one, dict) and _is_message(one)]
        if len(found) < len(flat):
            self.report(text)
        return [*found]

    def _refuse(self, text: str, error: Exception) -> list[dict[str, Any] | UnreadableText]:
        """Interpret a text that is not JSON: as an answer, as a line of a log that contains one, or as neither."""
        plain = text.lstrip(_PAST_TEXT).replace("\0", "")
        if _OBJECT.match(plain) and _MEMBER.search(plain) and not _METHOD.search(plain):
            problem = "it is not encoded as UTF-8" if "\0" in text else str(error) or type(error).__name__
            return [self._unreadable(plain, problem)]
        self.report(text)
        if (start := _EMBEDDED.search(text)) is not None:
            try:
                value, _ = _DECODER.raw_decode(text, start.start())
            except (ValueError, RecursionError):
                return []
            return [value] if "result" in value or "error" in value else []
        return []

    def _unreadable(self, text: str, problem: str) -> UnreadableText:
        found = _ID.match(text)
        return UnreadableText(problem=self._described(text, problem), request_id=None if found is None else found[1])

    def _described(self, text: str, problem: str) -> str:
        return f"{self.place} ({problem}): {shown(text)}"

    @property
    def place(self) -> str:
        """Description of the lines of the text that was read last."""
        lines = f"line {self._first}" if self._first == self._last else f"lines {self._first} to {self._last}"
        return f"{lines} of its standard output"

    def report(self, text: str) -> None:
        """Report a text that belongs to no answer."""
        self._report(f"{self.place}: {shown(text)}")


def _values(text: str) -> list[Any]:
    """Return all JSON values in a text.

    Raises:
        ValueError: there is something else between them.
    """
    found, place = [], 0
    while rest := text[place:].lstrip():
        place = len(text) - len(rest)
        value, place = _DECODER.raw_decode(text, place)
        found.append(value)
    return found


def _is_message(value: Mapping[str, Any]) -> bool:
    return "jsonrpc" in value or ("id" in value and bool({"result", "error"} & value.keys()))


def shown(text: str) -> str:
    """Quote the beginning of a text."""
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…")
