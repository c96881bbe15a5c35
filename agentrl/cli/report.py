"""`agentrl report`: runs, or evaluations side by side, as HTML and Markdown."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.evaluations import own_evaluations, read_evaluation
from agentrl.cli.help_pages import examples
from agentrl.cli.reports import decoder, newest_examples, read_reported_run
from agentrl.errors import AgentRLError, UsageError
from agentrl.evaluation.panel import EPISODES_FILE
from agentrl.evaluation.report import panel_warnings, write_report
from agentrl.evaluation.run_report import run_report
from agentrl.observe.console import note
from agentrl.observe.run_folder import RUN_OR_EVALUATION, require_run
from agentrl.training.stored_episodes import model_of_run

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl report runs/latest",
        "agentrl report runs/seed-0 runs/seed-1 runs/seed-2 --output runs/three-seeds",
        "agentrl report runs/latest/evaluations/engine-4f0c2a9d1b3e runs/evaluations/engine-9d1b3e4f0c2a",
        "agentrl report runs/latest --price-per-hour 2.5",
    )
)
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN|EVALUATION...", help="Folders of runs, or of evaluations to put side by side."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the report; default: the run's or evaluation's folder, if there is one."),
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option("--price-per-hour", min=0, help="Price of the machine per hour, for the cost.")
    ] = None,
) -> None:
    """Write a report: curves with intervals, success by task type, cost, settings, machine, problems, and how to repeat
    it.

    Runs that differ only in their seed get one curve with intervals over the seeds. Evaluations are compared task by
    task with the first one.
    """
    if output is None and len(folders) > 1:
        raise UsageError("a report of several folders needs --output", expected="--output FOLDER")
    results = {found.name: read_evaluation(found) for found in map(Path.resolve, folders) if _is_evaluation(found)}
    others = [folder for folder in folders if not _is_evaluation(folder.resolve())]
    runs = [read_reported_run(run) for run in [require_run(folder, RUN_OR_EVALUATION) for folder in others]]
    if len(runs) == 1:
        results |= own_evaluations(runs[0].folder)
    target = output or (runs[0].folder.path if runs else folders[0])
    shown = newest_examples(runs[0].folder) if len(runs) == 1 else []
    decode = None
    with suppress(AgentRLError, OSError, ValueError):  # no model: without examples
        decode = decoder(model_of_run(runs[0].folder)) if shown else None
    made = run_report(runs, results=results, examples=shown, price_per_hour=price_per_hour)
    files = write_report(made, target, decode)
    for warning in panel_warnings(results):
        note(f"warning: {warning}")
    note(f"report: {files.html}\n        {files.markdown}")


def _is_evaluation(folder: Path) -> bool:
    return (folder / EPISODES_FILE).is_file()
