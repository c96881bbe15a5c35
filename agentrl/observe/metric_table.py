"""Table of all metrics in ``metrics.jsonl``: meaning, unit, healthy range, and remedy outside it.

The table is the file ``metric_table.yaml``; docs/metrics.md is generated from it, and tests compare it with the metrics
of runs. A part of a name in capitals matches any text (``env/LABEL/success``), and ``METRIC`` matches another metric of
the table, with or without its prefix ``train/`` or ``time/``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

FILE = Path(__file__).with_suffix(".yaml")
PLACEHOLDER = re.compile(r"(?<![A-Za-z])[A-Z]{2,}(?![A-Za-z])")
METRIC = "METRIC"
"""Placeholder for the name of another metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentedMetric:
    """A metric, or several with one meaning.

    Example: ``DocumentedMetric(names=("success/mean",), meaning="share of solved episodes", unit="share")``.
    """

    names: tuple[str, ...]
    """Names, with placeholders in capitals."""
    meaning: str
    unit: str = ""
    healthy: str = ""
    """Healthy range; empty if it depends on the task."""
    remedy: str = ""
    """Action to take outside the range."""


@functools.cache
def metric_sections() -> Mapping[str, tuple[DocumentedMetric, ...]]:
    """Return the table, by title of a section."""
    return {
        title: tuple(DocumentedMetric(**{**row, "names": tuple(row["names"].split(", "))}) for row in rows)
        for title, rows in yaml.safe_load(FILE.read_text(encoding="utf-8")).items()
    }


def documented_names() -> list[str]:
    """Return the names of all metrics, with placeholders."""
    return [name for rows in metric_sections().values() for row in rows for name in row.names]


@functools.cache
def _patterns() -> Mapping[str, re.Pattern[str]]:
    """Return the pattern of each name; those with fewer placeholders, and then longer ones, come first."""
    order = sorted(documented_names(), key=lambda name: (len(PLACEHOLDER.findall(name)), -len(name)))
    return {name: re.compile(_pattern(name)) for name in order}


def _pattern(name: str) -> str:
    *parts, last = PLACEHOLDER.sub("\0", name).split("\0")
    if not parts:
        return re.escape(last)
    return "([^/]+)".join(map(re.escape, parts)) + "(.+)" + re.escape(last)


def find_documented(name: str) -> str | None:
    """Return the name under which the table documents a metric; ``None`` if it does not.

    >>> find_documented("env/kitchen/success"), find_documented("adapter/writer/nonsense")
    ('env/LABEL/success', None)
    """
    for documented, pattern in _patterns().items():
        found = pattern.fullmatch(name)
        if found is not None and (not documented.endswith(METRIC) or _is_metric(found[found.re.groups])):
            return documented
    return None


def _is_metric(name: str) -> bool:
    return any(find_documented(prefix + name) is not None for prefix in ("", "train/", "time/", "time/train/"))
