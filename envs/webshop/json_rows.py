"""Reads the objects of a large JSON array one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from agentrl.errors import UsageError

CHUNK = 1 << 20
"""Characters that are read at once; more for an object that is longer."""
_DECODER = json.JSONDecoder()
_NO_BLANK = re.compile(r"[^ \t\n\r]")


def read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file that holds one JSON array of objects. Not more is read than is asked for.

    Raises:
        UsageError: the file holds something else, or ends within the array.
    """
    with path.open(encoding="utf-8") as file:
        text = _Text(file, path)
        if text.next_character() != "[":
            raise text.broken("no array")
        text.skip()
        while text.next_character() != "]":
            yield text.next_object()
            follows = text.next_character()
            if follows == ",":
                text.skip()
            elif follows != "]":
                raise text.broken(f"{follows!r} after an object")


class _Text:
    """The part of a file that is being read."""

    def __init__(self, file: TextIO, path: Path) -> None:
        self._file, self._path = file, path
        self._read, self._at = "", 0

    def next_character(self) -> str:
        """The next one that is not blank; empty at the end of the file."""
        while True:
            found = _NO_BLANK.search(self._read, self._at)
            self._at = found.start() if found else len(self._read)
            if found or not self._more():
                return found[0] if found else ""

    def skip(self) -> None:
        """Go on behind the character."""
        self._at += 1

    def next_object(self) -> dict[str, Any]:
        """Read an object."""
        while True:
            self.next_character()
            try:
                row, self._at = _DECODER.raw_decode(self._read, self._at)
            except json.JSONDecodeError as error:
                if self._more():
                    continue
                raise self.broken(error) from error
            if not isinstance(row, dict):
                raise self.broken(f"{row!r} among the objects")
            return row

    def broken(self, what: object) -> UsageError:
        """The error that says that this is no such file."""
        return UsageError(f"{self._path} cannot be read", got=what, expected="a JSON array of objects")

    def _more(self) -> bool:
        kept = self._read[self._at :]
        more = self._file.read(max(CHUNK, len(kept)))
        self._read, self._at = kept + more, 0
        return bool(more)
