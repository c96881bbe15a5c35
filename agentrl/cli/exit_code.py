"""What the program ends with."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """What the program ends with."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130
