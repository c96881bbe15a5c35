"""Report of an evaluation or a run: Markdown for any reader, and HTML with episodes and the learning curve."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from agentrl.evaluation.comparison import PanelMatch, Verdict, compare, compare_panels, evaluation_scores
from agentrl.evaluation.curves import NamedRuns, draw_curves
from agentrl.evaluation.result import UNTYPED, EvaluationResult, estimate_text
from agentrl.evaluation.token_view import LEGEND, Decode, template, trajectory_html
from agentrl.observe.console import visible
from agentrl.observe.files import replace_file, writing
from agentrl.observe.metrics import ENVIRONMENT_PREFIX
from agentrl.trajectory import Trajectory

CURVES: tuple[tuple[str, str], ...] = (
    ("success/mean", "training success"),
    ("reward/mean", "training reward"),
    ("eval/success", "evaluation success"),
)
"""Metric names and their legend texts, in drawing order."""
_OF_ENVIRONMENT = re.compile(rf"{ENVIRONMENT_PREFIX}[\w-]+/success")
EXAMPLES = 6
CURVES_NOTE = (
    "Shaded: 95 % intervals, over a step's episodes or, for several runs, over their seeds. Dots: evaluations."
)
CURVE_FILE = "learning_curve.png"
PANELS_FILE = "curves.png"


def curves(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the metric names and legend texts of curves with points, those of single environments last."""
    names = {name for line in metrics for name in line}
    labels = sorted(name.split("/")[1] for name in names if _OF_ENVIRONMENT.fullmatch(name))
    own = [
        curve
        for label in labels
        for curve in ((f"env/{label}/success", f"{label}, training"), (f"eval/{label}/success", f"{label}, evaluation"))
    ]
    return [(name, words) for name, words in (*CURVES, *own) if _points(metrics, name)]


def draw_learning_curve(metrics: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw success and, on an axis of its own, reward over the training steps of ``metrics.jsonl`` as a PNG."""
    if not curves(metrics):
        raise ValueError(f"no metric to draw: expected one of {', '.join(name for name, _ in CURVES)}")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    drawn = curves(metrics)
    has_both = len({name.startswith("reward/") for name, _ in drawn}) == 2
    right = axes.twinx() if has_both else axes
    lines = []
    for number, (name, label) in enumerate(drawn):
        points = _points(metrics, name)
        is_reward, dotted = name.startswith("reward/"), name.startswith("eval/") or len(points) == 1
        style = "o-" if dotted else "--" if is_reward else "-"  # equal curves stay visible
        steps, values = [step for step, _ in points], [value for _, value in points]
        lines += (right if is_reward else axes).plot(steps, values, style, color=f"C{number}", label=label)
    axes.set_xlabel("training step")
    if has_both:
        axes.set_ylabel("success")
        right.set_ylabel("reward")
    axes.grid(alpha=0.3)
    axes.legend(handles=lines)
    figure.savefig(file, format="png", dpi=120)


def _points(metrics: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return steps and values; an evaluation in parallel with training belongs to the step that it measured."""
    at = "eval/at_step" if name.startswith("eval/") else "step"
    return [(int(line.get(at, line["step"])), float(line[name])) for line in metrics if line.get(name) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Contents of a report; empty fields are omitted."""

    title: str
    results: Mapping[str, EvaluationResult] = field(default_factory=dict)
    """Evaluations by the name of their column, such as ``before`` and ``after``."""
    metrics: Sequence[Mapping[str, Any]] = ()
    examples: Sequence[Trajectory] = ()
    notes: Sequence[str] = ()
    problems: Sequence[str] = ()
    """Problems, the most severe one first."""
    run_tables: Sequence[ReportTable] = ()
    runs: Sequence[NamedRuns] = ()
    """Runs whose curves are drawn, with intervals."""
    commands: Sequence[str] = ()
    """Commands that repeat the runs, each with a description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """Table of text; the first column is the row's label."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFiles:
    """Files of a written report."""

    markdown: Path
    html: Path
    curve: Path | None
    panels: Path | None = None
    """Curves of all metrics."""


def write_report(report: Report, folder: Path, decode: Decode | None) -> ReportFiles:
    """Write ``report.md``, ``report.html`` and, if there are metrics, pictures of curves into `folder`.

    `decode` returns the text of a token id; without it the report has no examples.

    Raises:
        UsageError: the folder cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        curve = folder / CURVE_FILE if curves(report.metrics) else None
        if curve is not None:
            draw_learning_curve(report.metrics, curve)
        panels = folder / PANELS_FILE if draw_curves(report.runs, folder / PANELS_FILE) else None
    files = ReportFiles(markdown=folder / "report.md", html=folder / "report.html", curve=curve, panels=panels)
    examples = [] if decode is None else [trajectory_html(example, decode) for example in report.examples]
    replace_file(files.markdown, visible(markdown(report, curve, panels)).encode())  # users read it in terminals too
    replace_file(files.html, _html(report, curve, panels, examples).encode())
    return files


def choose_examples(trajectories: Sequence[Trajectory], count: int = EXAMPLES) -> list[Trajectory]:
    """Choose alternately solved and unsolved episodes, with as many types of tasks as possible."""
    with_tokens = [t for t in trajectories if any(len(sequence) for sequence in t.sequences)]
    solved = _kinds_first([t for t in with_tokens if t.success])
    others = _kinds_first([t for t in with_tokens if not t.success])
    mixed = [t for pair in zip(solved, others, strict=False) for t in pair]
    rest = [*solved[len(mixed) // 2 :], *others[len(mixed) // 2 :]]
    return [*mixed, *rest][:count]


def markdown(report: Report, curve: Path | None = None, panels: Path | None = None) -> str:
    """Write the report as Markdown."""
    lines = [f"# {report.title}", ""]
    for note in report.notes:
        lines += [note, ""]
    if report.problems:
        listed = (f"{number}. {' '.join(problem.split())}" for number, problem in enumerate(report.problems, 1))
        lines += ["## Problems", "", *listed, ""]
    for table in (*tables(report.results), *report.run_tables):
        lines += [f"## {table.title}", "", *markdown_table(table), ""]
    if report.commands:
        lines += ["## How to repeat it", "", "```text", *report.commands, "```", ""]
    if curve is not None:
        lines += ["## Learning curve", "", f"![learning curve]({curve.name})", ""]
    if panels is not None:
        lines += ["## Curves", "", CURVES_NOTE, "", f"![curves with intervals]({panels.name})", ""]
    return "\n".join(lines)


def tables(results: Mapping[str, EvaluationResult]) -> list[ReportTable]:
    """Make the tables of a report, one column for each evaluation."""
    if not results:
        return []
    columns = list(results.values())
    header = ["", *results]
    types = sorted({name for result in columns for name in result.by_task_type})
    outcomes = sorted({outcome for result in columns for outcome in result.outcomes})
    by_type = [[name, *(_type_cell(result, name) for result in columns)] for name in types]
    by_outcome = [[o.value, *(str(result.outcomes.get(o, 0)) for result in columns)] for o in outcomes]
    return [
        ReportTable(title="Result", header=header, rows=_overview(columns)),
        *([ReportTable(title="Success by type of task", header=header, rows=by_type)] if {*types} - {UNTYPED} else []),
        ReportTable(title="Outcomes", header=header, rows=by_outcome),
        *_comparisons(results),
    ]


def _comparisons(results: Mapping[str, EvaluationResult]) -> list[ReportTable]:
    """Compare each evaluation with the first one, task by task."""
    (first, base), *others = results.items()
    before, rows = evaluation_scores(base.episodes), []
    for name, result in others:
        if result.panel.environment != base.panel.environment:
            continue
        found = compare(before, evaluation_scores(result.episodes))
        same = compare_panels(base.panel_hash, result.panel_hash)
        if (test := found.test) is not None:
            counts = [str(found.count(verdict)) for verdict in (Verdict.WON, Verdict.LOST, Verdict.SAME)]
            cells = [test.measure, str(test), str(len(found.tasks)), *counts, f"{test.p:.2g}"]
            rows.append([f"{name} against {first}", same.value, *cells])
        else:
            rows.append([f"{name} against {first}", same.value, "none", "no common task", *["0"] * 4, "none"])
    header = ["", "panel", "measure", "difference (95 % interval)", "tasks", "won", "lost", "tied", "p"]
    return [ReportTable(title="Paired comparison on common tasks", header=header, rows=rows)] if rows else []


def panel_warnings(results: Mapping[str, EvaluationResult]) -> list[str]:
    """Return a warning for each evaluation of the first one's environment on a different panel."""
    if len(results) < 2:
        return []
    (first, base), *others = results.items()
    return [
        f"{name} was evaluated on a different panel from {first} ({result.panel_hash} instead of {base.panel_hash}): "
        "other tasks, samples or seeds. Only the paired comparison, over their common tasks, compares the two."
        for name, result in others
        if result.panel.environment == base.panel.environment
        and compare_panels(base.panel_hash, result.panel_hash) is PanelMatch.DIFFERENT
    ]


def _overview(columns: Sequence[EvaluationResult]) -> list[list[str]]:
    rows = [
        ["environment", *(r.panel.environment for r in columns)],
        ["policy", *(r.panel.policy for r in columns)],
        ["model", *(r.panel.model or "none" for r in columns)],
        ["tasks x samples", *(f"{r.panel.n_tasks} x {r.panel.samples}" for r in columns)],
        ["panel", *(r.panel_hash or "unknown" for r in columns)],
        ["success (95 % interval)", *("unknown" if r.success is None else estimate_text(r.success) for r in columns)],
        ["mean reward", *("none" if r.reward is None else f"{r.reward.mean:.3f}" for r in columns)],
    ]
    if any(r.repaired_calls for r in columns):
        rows.append(["repaired tool calls", *(f"{r.repaired_calls:,}" for r in columns)])
    for k in sorted({k for r in columns for k in r.pass_at_k if k > 1}):
        rows.append([f"pass@{k}", *(_pass_cell(r, r.pass_at_k.get(k), k) for r in columns)])
        rows.append([f"pass^{k}", *(_pass_cell(r, r.pass_hat_k.get(k), k) for r in columns)])
    return [
        *rows,
        ["turns per episode", *(f"{r.turns:.1f}" for r in columns)],
        ["tokens per episode", *(f"{r.tokens:.0f}" if r.tokens else "not counted" for r in columns)],
        *(
            [["reused episodes", *(r.reused_words or "none" for r in columns)]]
            if any(r.reused for r in columns)
            else []
        ),
        ["infrastructure failures", *(f"{r.failures} ({r.retries} retries)" for r in columns)],
        ["seconds", *(f"{r.seconds:.1f}" for r in columns)],
        ["tokens/s", *(f"{r.tokens_per_s:,.0f}" if r.tokens_per_s else "none" for r in columns)],
    ]


def _type_cell(result: EvaluationResult, name: str) -> str:
    found = result.by_task_type.get(name)
    if found is None:
        return "not played"
    return f"{'unknown' if found.success is None else estimate_text(found.success)}, n = {found.n_tasks}"


def _pass_cell(result: EvaluationResult, value: float | None, k: int) -> str:
    """Format a pass@k with the number of tasks that have k measured episodes, if others lost some to failures."""
    samples = Counter(episode.task_id for episode in result.episodes if episode.is_measured)
    tasks = sum(count >= k for count in samples.values())
    share = _share(value)
    return share if value is None or tasks == result.panel.n_tasks else f"{share} (of {tasks} tasks)"


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{100 * value:.1f} %"


def markdown_table(table: ReportTable) -> list[str]:
    """Return a table as lines of Markdown."""
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]


def _html(report: Report, curve: Path | None, panels: Path | None, examples: Sequence[str]) -> str:
    return template("report.html").render(
        title=report.title,
        notes=report.notes,
        problems=report.problems,
        tables=[*tables(report.results), *report.run_tables],
        commands=report.commands,
        picture=_encode_picture(curve),
        panels=_encode_picture(panels),
        panels_note=CURVES_NOTE,
        examples=examples,
        legend=LEGEND,
    )


def _encode_picture(picture: Path | None) -> str | None:
    return None if picture is None else base64.b64encode(picture.read_bytes()).decode()


def _kinds_first(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Order trajectories so that each type's first one precedes all second ones, and so on."""
    seen: dict[str | None, int] = {}
    ranked = []
    for position, trajectory in enumerate(trajectories):
        rank = seen[trajectory.task_type] = seen.get(trajectory.task_type, -1) + 1
        ranked.append((rank, position, trajectory))
    return [trajectory for _, _, trajectory in sorted(ranked, key=lambda entry: entry[:2])]
