"""Incremental reader of large JSON files: the objects of an array, or the members of an object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from agentrl.errors import UsageError

CHUNK = 1 << 20
"""Characters that are read at once; more for a longer part."""
_DECODER = json.JSONDecoder()
_NO_BLANK = re.compile(r"[^ \t\n\r]")


class Member(NamedTuple):
    """A member of an object."""

    name: str
    value: Any


def read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with one JSON array of objects; the file is read lazily.

    Raises:
        UsageError: the file has another content, or ends within the array.
    """
    with path.open(encoding="utf-8") as file:
        text = _Text(file, path, expected="a JSON array of objects")
        for _ in text.parts("[", "]"):
            row = text.next_value()
            if not isinstance(row, dict):
                raise text.broken(f"{row!r} among the objects")
            yield row


def read_json_members(path: Path) -> Iterator[Member]:
    """Yield the members of a file with one JSON object; the file is read lazily.

    Raises:
        UsageError: the file has another content, or ends within the object.
    """
    with path.open(encoding="utf-8") as file:
        text = _Text(file, path, expected="a JSON object")
        for _ in text.parts("{", "}"):
            name = text.next_value()
            text.skip(":")
            yield Member(name, text.next_value())


class _Text:
    """The part of a file that is being read."""

    def __init__(self, file: TextIO, path: Path, *, expected: str) -> None:
        self._file, self._path, self._expected = file, path, expected
        self._read, self._at = "", 0

    def parts(self, opening: str, closing: str) -> Iterator[None]:
        """Yield at the start of each part, which the caller must then read."""
        self.skip(opening)
        if self._next_character() != closing:
            yield
        while self._next_character() != closing:
            self.skip(",")
            yield

    def skip(self, character: str) -> None:
        """Skip a character, which must come next."""
        found = self._next_character()
        if found != character:
            raise self.broken(f"{found!r} instead of {character!r}")
        self._at += 1

    def next_value(self) -> Any:
        """Read a text, an object or an array."""
        while True:
            self._next_character()
            try:
                value, self._at = _DECODER.raw_decode(self._read, self._at)
            except json.JSONDecodeError as error:
                if not self._more():
                    raise self.broken(error) from error
            else:
                return value

    def broken(self, what: object) -> UsageError:
        """Return the error for a file with other content."""
        return UsageError(f"{self._path} cannot be read", got=what, expected=self._expected)

    def _next_character(self) -> str:
        """Return the next character that is not blank; empty at the end of the file."""
        while True:
            found = _NO_BLANK.search(self._read, self._at)
            self._at = found.start() if found else len(self._read)
            if found or not self._more():
                return found[0] if found else ""

    def _more(self) -> bool:
        kept = self._read[self._at :]
        more = self._file.read(max(CHUNK, len(kept)))
        self._read, self._at = kept + more, 0
        return bool(more)
