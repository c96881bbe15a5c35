"""The learning curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

CURVES: tuple[tuple[str, str], ...] = (
    ("success/mean", "training success"),
    ("reward/mean", "training reward"),
    ("eval/success", "evaluation success"),
)
"""Metric names and what they are called in the legend, in drawing order."""


def drawable(metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is anything to draw."""
    return any(_points(metrics, name) for name, _ in CURVES)


def draw_learning_curve(metrics: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw success and reward over training steps as a PNG.

    Args:
        metrics: The lines of ``metrics.jsonl``, each with ``step``.
        file: Where the picture goes.

    Raises:
        ValueError: none of the curves has a point.
    """
    if not drawable(metrics):
        raise ValueError(f"no metric to draw: expected one of {', '.join(name for name, _ in CURVES)}")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, label in CURVES:
        points = _points(metrics, name)
        if points:
            dotted = name.startswith("eval/") or len(points) == 1
            style = "o-" if dotted else "--" if name.startswith("reward/") else "-"  # both lines show where they agree
            axes.plot([step for step, _ in points], [value for _, value in points], style, label=label)
    axes.set_xlabel("training step")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, format="png", dpi=120)


def _points(metrics: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(int(line["step"]), float(line[name])) for line in metrics if line.get(name) is not None]
