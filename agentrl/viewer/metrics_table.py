"""Metrics of a run as columns; the file is read incrementally while it grows."""

from __future__ import annotations

import math
import re
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.errors import Outcome
from agentrl.evaluation.result import wilson_interval
from agentrl.observe.files import DamagedRecord, decode_record
from agentrl.observe.metrics import MARGIN_ERRORS

GROUPS: tuple[tuple[str, str], ...] = (
    ("Success", r"success/mean|eval/(.+/)?success|env/[^/]+/success|eval/success/.+"),
    ("Reward", r"reward/(mean|min|max|std)|eval/(.+/)?reward|role/.+/return/mean|env/[^/]+/reward.*"),
    ("Reward components", r"reward/component/.+"),
    ("Length", r"turns/(mean|max)|tokens/.+|eval/(.+/)?(turns|tokens)|time/episode/.+"),
    ("Loss", r"(train|sft|preferences|reward_model|critic)/(.*_)?(loss|accuracy)"),
    ("Entropy", r"train/entropy.*"),
    ("KL", r".*\bkl.*|.*_kl\b.*"),
    ("Mismatch", r"mismatch/.+|train/ratio.*|train/clip.*"),
    ("Gradient norm", r".*grad_norm.*"),
    ("Staleness", r"staleness/.+"),
    ("Groups", r"groups/.+"),
    ("Outcomes", r"outcome/.+"),
    ("Time by phase", r"time/(?!episode/|tokens_per_s|turns/).+"),
    ("Time of turns", r"time/turns/.+"),
    ("Tokens/s", r".*tokens_per_s.*"),
)
"""Titles of charts, and the patterns of their metrics; a metric belongs to the first that fits, or to ``Other``."""
AT_STEP = "eval/at_step"
"""Metric with the step of the evaluated weights, if it differs from the line's step."""
_FAILURES = tuple(f"outcome/{outcome.value}" for outcome in Outcome if outcome.is_infrastructure)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricColumns:
    """Metrics of all steps; the arrays are immutable."""

    steps: npt.NDArray[np.int64]
    """Steps [n]."""
    columns: Mapping[str, npt.NDArray[np.float64]]
    """Values by name [n]; NaN if unknown."""

    def last(self, name: str) -> float | None:
        """Return the newest known value; ``None`` if there is none."""
        values = self.columns.get(name)
        known = [] if values is None else values[~np.isnan(values)].tolist()
        return known[-1] if known else None


class MetricsTable:
    """Reader of one ``metrics.jsonl``, which reads only the new part of a file that has grown.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._identity, self._position, self._has_checksums = (0, 0), 0, False
        self._steps: array[int] = array("q")
        self._columns: dict[str, array[float]] = {}
        self._tail = b""
        self._lines = 0
        self.damaged: list[int] = []
        """Numbers of the lines that cannot be read, from 1."""

    def read(self) -> MetricColumns:
        """Return the metrics; none if the file does not exist."""
        with self._lock:
            try:
                self._follow()
            except OSError:
                self._forget()
            return MetricColumns(
                steps=np.array(self._steps, dtype=np.int64),
                columns={name: np.array(values, dtype=np.float64) for name, values in self._columns.items()},
            )

    def _follow(self) -> None:
        with self._path.open("rb") as file:
            state = self._path.stat()
            if (state.st_dev, state.st_ino) != self._identity or not self._continues(file, state.st_size):
                self._forget()
                self._identity = (state.st_dev, state.st_ino)
            file.seek(self._position)
            data = file.read()
        end = data.rfind(b"\n") + 1
        for line in data[:end].splitlines():
            self._add(line)
        if end:
            self._position += end
            self._tail = data[:end][-256:]

    def _continues(self, file: Any, size: int) -> bool:
        if size < self._position:
            return False
        file.seek(self._position - len(self._tail))
        return bool(file.read(len(self._tail)) == self._tail)

    def _add(self, line: bytes) -> None:
        self._lines += 1
        try:
            record = decode_record(line, needs_checksum=self._has_checksums)
        except DamagedRecord:
            if line:  # an empty line follows an unfinished one in a truncated file
                self.damaged.append(self._lines)
            return
        self._has_checksums = self._has_checksums or b'"crc32:' in line
        step = record.pop("step", None)
        if not isinstance(step, int) or not 0 <= step < 2**62:
            return
        while self._steps and self._steps[-1] >= step:  # a resumed run wrote the step again
            self._steps.pop()
            for values in self._columns.values():
                values.pop()
        known = len(self._steps)
        self._steps.append(step)
        for name, value in record.items():
            if isinstance(value, int | float):
                column = self._columns.setdefault(name, array("d", [math.nan]) * known)
                column.append(_finite(value))
        for column in self._columns.values():
            if len(column) == known:
                column.append(math.nan)


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def metrics_document(found: MetricColumns, *, after: int | None = None) -> dict[str, Any]:
    """Return the metrics of the steps after one: values, intervals, evaluations and the charts' groups."""
    chosen = found.steps > (-1 if after is None else after)
    columns = {name: values[chosen] for name, values in found.columns.items()}
    newer = MetricColumns(steps=found.steps[chosen], columns=columns)
    return {
        "names": sorted(columns),
        "steps": newer.steps,
        "columns": {name: columns[name] for name in sorted(columns)},
        "intervals": _intervals(newer),
        "evaluations": _evaluations(newer),
        "groups": group_names(sorted(columns)),
    }


def group_names(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the titles of charts with the names of their metrics, without empty charts."""
    found: dict[str, list[str]] = {title: [] for title, _ in GROUPS}
    for name in names:
        title = next((title for title, pattern in GROUPS if re.fullmatch(pattern, name)), "Other")
        found.setdefault(title, []).append(name)
    return [{"title": title, "names": members} for title, members in found.items() if members]


def _intervals(found: MetricColumns) -> dict[str, Any]:
    """Return intervals of 95 %: Wilson's for success, and of the mean for the reward, over a step's episodes.

    They treat the episodes of a group as independent, so they are narrower than those of an evaluation.
    """
    intervals: dict[str, Any] = {}
    counts = _trained_episodes(found)
    if (success := found.columns.get("success/mean")) is not None:
        intervals["success/mean"] = _wilson(success, counts)
    mean, spread = found.columns.get("reward/mean"), found.columns.get("reward/std")
    if mean is not None and spread is not None:
        margin = MARGIN_ERRORS * spread / np.sqrt(np.maximum(counts, 1))
        intervals["reward/mean"] = {"low": mean - margin, "high": mean + margin}
    for name in found.columns:
        low, high = found.columns.get(f"{name}_low"), found.columns.get(f"{name}_high")
        if low is not None and high is not None:
            intervals[name] = {"low": low, "high": high}
    return intervals


def _trained_episodes(found: MetricColumns) -> npt.NDArray[np.float64]:
    """Return the number of episodes of each step without infrastructure failures; NaN if unknown."""
    episodes = found.columns.get("episodes", np.full(len(found.steps), math.nan))
    failed = sum((np.nan_to_num(found.columns[name]) for name in _FAILURES if name in found.columns), np.zeros(1))
    return np.asarray(np.rint(episodes * (1 - failed)), dtype=np.float64)


def _wilson(shares: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> dict[str, list[float | None]]:
    low: list[float | None] = []
    high: list[float | None] = []
    for share, count in zip(shares, counts, strict=True):
        known = 0 <= share <= 1 and count >= 1  # false for NaN
        interval = wilson_interval(float(share * count), float(count)) if known else None
        low.append(None if interval is None else interval.low)
        high.append(None if interval is None else interval.high)
    return {"low": low, "high": high}


def _evaluations(found: MetricColumns) -> list[dict[str, Any]]:
    """Return the evaluations during training, by the step whose weights they measured."""
    success = found.columns.get("eval/success")
    reward = found.columns.get("eval/reward")
    given = success if success is not None else reward
    if given is None:
        return []
    names = {"success": "eval/success", "low": "eval/success_low", "high": "eval/success_high", "reward": "eval/reward"}
    rows = []
    for index in np.flatnonzero(~np.isnan(given)):
        at = found.columns.get(AT_STEP)
        step = found.steps[index] if at is None or math.isnan(at[index]) else at[index]
        values = {
            key: None if name not in found.columns else float(found.columns[name][index]) for key, name in names.items()
        }
        rows.append({"step": int(step), **values, "episodes": None})
    return rows
