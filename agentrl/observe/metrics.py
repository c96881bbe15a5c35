"""``metrics.jsonl``: the numbers of every training step, exactly."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.observe.json_lines import JsonLinesWriter, numbered_records, warn_damaged

_log = logging.getLogger(__name__)

TIMING_PREFIX = "time/"
"""Names under which a run's clock shows; two equal runs differ only there."""

ENVIRONMENT_PREFIX = "env/"
"""Names of what belongs to one of several environments: ``env/LABEL/success``."""


class MetricsFile:
    """One line per step: ``{"step": 3, "reward/mean": 0.25, …}``. Floats keep every bit; non-finite ones are null.

    Args:
        path: The file; what it holds already is kept.
    """

    def __init__(self, path: Path) -> None:
        self._writer = JsonLinesWriter(path)

    def append(self, step: int, values: Mapping[str, float | int]) -> None:
        """Write the numbers of one step.

        Raises:
            UsageError: the disk is full.
        """
        self._writer.append({"step": step, **{name: _plain(value) for name, value in values.items()}})

    @property
    def position(self) -> int:
        """Bytes written so far; a checkpoint keeps it."""
        return self._writer.position

    def truncate(self, position: int) -> None:
        """Forget the steps after a checkpoint's position, before they are run again.

        A file that is shorter, because another program has cut it, is kept with a warning.
        """
        found = self._writer.position
        self._writer.truncate(position)
        if found < position:
            _log.warning(
                "%s has lost its end: %d of %d bytes are there; the metrics of some steps are missing",
                *(self._writer.path, found, position),
            )

    def sync(self) -> None:
        """Make it durable."""
        self._writer.sync()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the metrics of all steps; none where there is no file. Damaged lines are left out with a warning."""
    lines, damaged = [], list[int]()
    for number, record in numbered_records(path, damaged) if path.exists() else ():
        if isinstance(record.get("step"), int):
            lines.append(record)
        else:
            damaged.append(number)
    warn_damaged(path, damaged)
    return lines


def _plain(value: float | int) -> float | int | None:
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
