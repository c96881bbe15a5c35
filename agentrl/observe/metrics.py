"""``metrics.jsonl``: the numbers of every training step, exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.observe.json_lines import JsonLinesWriter, read_json_lines

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
        """Forget the steps after a checkpoint's position, before they are run again."""
        self._writer.truncate(position)

    def sync(self) -> None:
        """Make it durable."""
        self._writer.sync()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file."""
    return list(read_json_lines(path)) if path.exists() else []


def _plain(value: float | int) -> float | int | None:
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
