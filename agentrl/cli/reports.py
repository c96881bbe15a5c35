"""Reports of runs, evaluations and dry runs, and the learning curve of a running run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.table import Column, Table

from agentrl.config import Config, dump_config
from agentrl.config.estimate import EstimateRow
from agentrl.errors import AgentRLError
from agentrl.evaluation.diagnosis.watch import read_findings
from agentrl.evaluation.report import (
    CURVE_FILE,
    Report,
    ReportFiles,
    choose_examples,
    curves,
    draw_learning_curve,
    write_report,
)
from agentrl.evaluation.run_report import ReportedRun, config_of, run_report
from agentrl.evaluation.session import FinishedEvaluation
from agentrl.observe.console import note, out
from agentrl.observe.metrics import read_metrics
from agentrl.observe.model_folder import find_model
from agentrl.observe.run_folder import RunDirectory, find_run
from agentrl.observe.terminal import repeating
from agentrl.observe.trajectory_store import read_trajectories, step_files
from agentrl.render.tokenizers import load_tokenizer
from agentrl.runs.diagnosis import diagnose_folder
from agentrl.runs.dry_run import describe_run
from agentrl.runs.start import StartCheck
from agentrl.runs.start_record import read_start_record
from agentrl.trajectory import Trajectory

DRAWN_EVERY_S = 60.0
"""Seconds between two updates of the learning curve."""


def print_dry_run(
    config: Config, estimates: Sequence[EstimateRow], *, check: StartCheck, size: str | None = None, with_config: bool
) -> None:
    """Print the size and the estimates of a run, after the checks that its start makes; then its resolved config."""
    found = describe_run(config, estimates, check=check, say=note)
    if size is not None:
        out.print(f"{size}\n")
    columns = [Column(name, overflow="fold") for name in ("quantity", "value", "from")]
    table = Table(*columns, box=None, pad_edge=False)
    for row in found.rows:
        table.add_row(*row)
    out.print(table)
    if with_config:
        out.print(f"\n{dump_config(found.config)}", end="")


def write_evaluation_report(finished: FinishedEvaluation) -> ReportFiles:
    """Write a report into the evaluation's folder, with the learning curve of the model's run."""
    result = finished.result
    run = None if result.panel.model is None else find_run(result.panel.model)
    report = Report(
        title=f"{result.panel.environment}: {result.panel.policy}",
        results={"result": result},
        metrics=[] if run is None else read_metrics(run.metrics_file),
        examples=choose_examples([episode.trajectory for episode in result.episodes]),
        problems=[problem.text for problem in result.problems],
    )
    return write_report(report, finished.folder, None if finished.model_path is None else decoder(finished.model_path))


def write_run_report(folder: Path) -> ReportFiles:
    """Write a report into a run's folder: learning curve, latest metrics, and episodes of the newest step that has any.

    Raises:
        UsageError: the folder cannot be written, or the run has no model.
    """
    run = RunDirectory(folder)
    metrics = read_metrics(run.metrics_file)
    step = metrics[-1]["step"] if metrics else 0
    reported = ReportedRun(
        folder=run,
        config=config_of(run),
        lines=metrics,
        state=f"step {step}",
        start=read_start_record(run),
        findings=read_findings(run),
    )
    report = run_report([reported], examples=newest_examples(run))
    return write_report(report, run.path, decoder(find_model(str(run.path))))


def read_reported_run(run: RunDirectory) -> ReportedRun:
    """Read the data of a run's report, with a new diagnosis."""
    found = diagnose_folder(run.path)
    return ReportedRun(
        folder=run,
        config=config_of(run),
        lines=read_metrics(run.metrics_file),
        state=found.ending,
        start=read_start_record(run),
        findings=found.findings,
    )


def newest_examples(run: RunDirectory) -> list[Trajectory]:
    """Choose episodes of the newest step that has any."""
    files = reversed(step_files(run.trajectories))
    newest = next((found for file in files if (found := [s.trajectory for s in read_trajectories(file)])), [])
    return choose_examples(newest)


@contextmanager
def updated_curve(folder: Path) -> Iterator[None]:
    """Draw the learning curve of the run in `folder` at the start of the block, and after new steps during it."""
    run, drawn_size = RunDirectory(folder), 0

    def draw() -> float:
        nonlocal drawn_size
        size = run.metrics_file.stat().st_size if run.metrics_file.is_file() else 0
        if size != drawn_size:
            drawn_size = size
            with suppress(AgentRLError, OSError):
                draw_curve(run)
        return DRAWN_EVERY_S

    with repeating("learning curve", draw):
        yield


def draw_curve(run: RunDirectory) -> None:
    """Draw ``learning_curve.png`` from the finished steps, replacing the file atomically."""
    metrics = read_metrics(run.metrics_file)
    if curves(metrics):
        partial = run.path / f".{CURVE_FILE}"
        draw_learning_curve(metrics, partial)
        partial.replace(run.path / CURVE_FILE)


def decoder(model_path: str) -> Callable[[int], str]:
    """Return a function that decodes a token id with the model's tokenizer."""
    tokenizer = load_tokenizer(model_path)
    return lambda token_id: str(tokenizer.decode([token_id], skip_special_tokens=False))
