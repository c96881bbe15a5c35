"""Append-only files of JSON lines that survive being killed at any moment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from agentrl.observe.disk import write_fully, writing


class JsonLinesWriter:
    """Appends one line per record, straight to the operating system: what was appended survives a killed process.

    A line that an earlier process left unfinished is closed first, so that it spoils no later one.

    Args:
        path: The file; made if needed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._close_torn_line()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record.

        Raises:
            UsageError: the disk is full.
        """
        with writing(self.path):
            write_fully(self._descriptor, _line(record))

    @property
    def position(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def truncate(self, position: int) -> None:
        """Forget everything after `position` bytes."""
        with writing(self.path):
            os.ftruncate(self._descriptor, position)

    def sync(self) -> None:
        """Make what was appended survive a power cut."""
        with writing(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _close_torn_line(self) -> None:
        size = self.position
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            write_fully(self._descriptor, b"\n")


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; a line that was cut short when its writer died is left out."""
    with path.open("rb") as file:
        for line in file:
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError:
                continue


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        return orjson.dumps(_without_surrogates(record), option=orjson.OPT_APPEND_NEWLINE)


def _without_surrogates(value: Any) -> Any:
    """The same with lone surrogates, which UTF-8 cannot hold, written out."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_without_surrogates(name): _without_surrogates(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    return value
