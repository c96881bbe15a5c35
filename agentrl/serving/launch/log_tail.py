"""The end of a server's log, as people want to read it."""

from __future__ import annotations

import re
from pathlib import Path

READ_BYTES = 65_536
"""Bytes at the end of a log that are looked at."""
LONGEST_LINE = 300
"""Characters of a line that are shown."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def last_lines(log: Path, count: int, *, start: int = 0) -> list[str]:
    """The last lines that are not empty, without colours; of a progress bar its last state.

    Args:
        log: The file; one that is not there has no lines.
        count: Most lines.
        start: Byte from which the file is read.
    """
    try:
        with log.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(start, end - READ_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = [_ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in text.split("\n")]
    return [line[:LONGEST_LINE] for line in lines if line][-count:]
