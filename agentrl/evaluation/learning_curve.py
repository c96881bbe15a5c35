"""The learning curve of a run as a picture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.observe.metrics import ENVIRONMENT_PREFIX

CURVES: tuple[tuple[str, str], ...] = (
    ("success/mean", "training success"),
    ("reward/mean", "training reward"),
    ("eval/success", "evaluation success"),
)
"""Metric names and what they are called in the legend, in drawing order."""
_OF_ENVIRONMENT = re.compile(rf"{ENVIRONMENT_PREFIX}[\w-]+/success")


def curves(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The curves that have points: names of metrics and words for the legend, those of several environments last."""
    names = {name for line in metrics for name in line}
    labels = sorted(name.split("/")[1] for name in names if _OF_ENVIRONMENT.fullmatch(name))
    own = [
        curve
        for label in labels
        for curve in ((f"env/{label}/success", f"{label}, training"), (f"eval/{label}/success", f"{label}, evaluation"))
    ]
    return [(name, words) for name, words in (*CURVES, *own) if _points(metrics, name)]


def drawable(metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is anything to draw."""
    return bool(curves(metrics))


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
    for name, label in curves(metrics):
        points = _points(metrics, name)
        dotted = name.startswith("eval/") or len(points) == 1
        style = "o-" if dotted else "--" if name.startswith("reward/") else "-"  # both lines show where they agree
        axes.plot([step for step, _ in points], [value for _, value in points], style, label=label)
    axes.set_xlabel("training step")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, format="png", dpi=120)


def _points(metrics: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(int(line["step"]), float(line[name])) for line in metrics if line.get(name) is not None]
