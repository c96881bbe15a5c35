"""Learning curves with intervals: over the episodes of a step or, for several runs, over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.evaluation.result import wilson_interval

PANELS: Mapping[str, tuple[str, ...]] = {
    "success": ("success/mean", "eval/success"),
    "reward": ("reward/mean", "eval/reward"),
    "sampled tokens per episode": ("tokens/sampled_per_episode",),
    "entropy": ("train/entropy",),
    "KL within a step": ("train/kl_old",),
    "trainer against engine": ("mismatch/prob_abs_mean",),
    "gradient norm": ("train/grad_norm",),
    "tokens/s": ("time/tokens_per_s",),
}
"""Titles of the panels, and their metrics: the training's as lines, the evaluations' as dots."""
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Quantiles of Student's distribution for intervals of 95 %, for 1 to 10 degrees of freedom."""
_NORMAL = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Value of a metric at a step, with its interval of 95 %; without one, `low` and `high` are the value."""

    step: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRuns:
    """One run, or several that differ only in their seed."""

    name: str
    metrics: Sequence[Sequence[Mapping[str, Any]]]
    """Lines of ``metrics.jsonl`` of each run."""


def curve(runs: NamedRuns, name: str) -> list[CurvePoint]:
    """Return the curve of a metric: with the interval of each step's episodes, or of the mean over several runs."""
    found = [_points(lines, name) for lines in runs.metrics]
    if len(found) == 1:
        return found[0]
    by_step = [{point.step: point.value for point in points} for points in found]
    steps = sorted(set.intersection(*map(set, by_step))) if by_step else []
    points = [_over_seeds(step, [values[step] for values in by_step]) for step in steps]
    if "success" not in name:
        return points
    return [replace(point, low=max(0.0, point.low), high=min(1.0, point.high)) for point in points]


def _over_seeds(step: int, values: Sequence[float]) -> CurvePoint:
    mean, freedom = fmean(values), len(values) - 1
    quantile = _T[freedom - 1] if freedom <= len(_T) else _NORMAL
    margin = quantile * stdev(values) / math.sqrt(len(values))
    return CurvePoint(step=step, value=mean, low=mean - margin, high=mean + margin)


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> list[CurvePoint]:
    points = []
    for line in lines:
        if (value := line.get(name)) is None:
            continue
        low, high = _interval(line, name, float(value))
        at = line.get("eval/at_step", line["step"]) if name.startswith("eval/") else line["step"]
        points.append(CurvePoint(step=int(at), value=float(value), low=low, high=high))
    return points


def _interval(line: Mapping[str, Any], name: str, value: float) -> tuple[float, float]:
    """Return the interval of a step's value: of its episodes, or of the evaluation."""
    episodes = float(line.get("episodes") or 0.0)
    if name.startswith("eval/"):
        low, high = line.get(f"{name}_low"), line.get(f"{name}_high")
        return (value, value) if low is None or high is None else (float(low), float(high))
    if name == "success/mean" and episodes and 0 <= value <= 1:
        found = wilson_interval(value * episodes, episodes)
        return found.low, found.high
    if name == "reward/mean" and episodes:
        margin = _NORMAL * float(line.get("reward/std") or 0.0) / math.sqrt(episodes)
        return value - margin, value + margin
    return value, value


def draw_curves(runs: Sequence[NamedRuns], file: Path) -> bool:
    """Draw a panel for each group of metrics that some run has, as a PNG; return False if there is none."""
    panels = {
        title: names for title, names in PANELS.items() if any(curve(one, name) for one in runs for name in names)
    }
    if not panels:
        return False
    rows = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(11, 2.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (title, names) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, 2, number)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("training step", fontsize=8)
        axes.grid(alpha=0.3)
        for position, one in enumerate(runs):
            for name in names:
                _draw(axes, one, name, f"C{position}", several=len(runs) > 1)
        if len(runs) > 1 or len(names) > 1:
            axes.legend(fontsize=8)
    figure.savefig(file, format="png", dpi=110)
    return True


def _draw(axes: Axes, runs: NamedRuns, name: str, color: str, *, several: bool) -> None:
    points = curve(runs, name)
    if not points:
        return
    is_evaluation = name.startswith("eval/")
    words = "evaluation" if is_evaluation else "training"
    steps, values = [point.step for point in points], [point.value for point in points]
    style = "o--" if is_evaluation else "-" if len(points) > 1 else "o"
    axes.plot(steps, values, style, color=color, label=f"{runs.name}, {words}" if several else words, markersize=4)
    axes.fill_between(steps, [p.low for p in points], [p.high for p in points], color=color, alpha=0.15, linewidth=0)
