"""`agentrl report`: runs, or evaluations side by side, as HTML and Markdown."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import orjson
import typer

from agentrl.cli.diagnose import diagnose_folder
from agentrl.cli.help import examples
from agentrl.cli.reports import decoder, newest_examples
from agentrl.errors import AgentRLError, UsageError
from agentrl.evaluation.panel import EPISODES_FILE, FOLDER, RESULT_FILE, Panel, stored_episodes
from agentrl.evaluation.report import write_report
from agentrl.evaluation.result import EvaluationResult, summarise
from agentrl.evaluation.run_report import ReportedRun, config_of, run_report
from agentrl.observe.console import note
from agentrl.observe.files import UNREADABLE
from agentrl.observe.metrics import read_metrics
from agentrl.observe.run_folder import RunDirectory, find_run
from agentrl.runs.start_record import read_start_record
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
    """Write a report: curves with intervals, types of task, cost, settings, machine, what is wrong, how to repeat it.

    Runs that differ only in their seed get one curve with intervals over the seeds. Evaluations are compared task by
    task with the first one.
    """
    if output is None and len(folders) > 1:
        raise UsageError("a report of several folders needs --output", expected="--output FOLDER")
    results = {found.name: read_evaluation(found) for found in map(Path.resolve, folders) if _is_evaluation(found)}
    runs = [_read_run(folder) for folder in folders if not _is_evaluation(folder.resolve())]
    if len(runs) == 1:
        results |= own_evaluations(runs[0].folder)
    target = output or (runs[0].folder.path if runs else folders[0])
    shown = newest_examples(runs[0].folder) if len(runs) == 1 else []
    decode = None
    with suppress(AgentRLError, OSError, ValueError):  # no model: without examples
        decode = decoder(model_of_run(runs[0].folder)) if shown else None
    made = run_report(runs, results=results, examples=shown, price_per_hour=price_per_hour)
    files = write_report(made, target, decode)
    note(f"report: {files.html}\n        {files.markdown}")


def _is_evaluation(folder: Path) -> bool:
    return (folder / EPISODES_FILE).is_file()


def _read_run(folder: Path) -> ReportedRun:
    """Read what the report says about a run.

    Raises:
        UsageError: the folder is not a run.
    """
    run = find_run(folder)
    if run is None:
        raise UsageError(
            f"{folder} is neither a run nor an evaluation",
            got="no config.yaml and no episodes.jsonl" if folder.is_dir() else "no such folder",
            expected="a folder such as runs/latest",
        )
    return read_reported_run(run)


def read_reported_run(run: RunDirectory) -> ReportedRun:
    """Read what the report says about a run, with a new diagnosis."""
    found = diagnose_folder(run.path)
    return ReportedRun(
        folder=run,
        config=config_of(run),
        lines=read_metrics(run.metrics_file),
        state=found.ending,
        start=read_start_record(run),
        findings=found.findings,
    )


def own_evaluations(run: RunDirectory) -> dict[str, EvaluationResult]:
    """Read the finished evaluations in a run's folder, in the order in which they ended."""
    files = sorted(run.path.glob(f"{FOLDER}/*/{RESULT_FILE}"), key=lambda file: file.stat().st_mtime_ns)
    found = {}
    for file in files:
        with suppress(UsageError):  # an unfinished or damaged one
            found[file.parent.name] = read_evaluation(file.parent)
    return found


def read_evaluation(folder: Path) -> EvaluationResult:
    """Read a finished evaluation, with its episodes.

    Raises:
        UsageError: the evaluation has not finished, or its result is damaged.
    """
    try:
        record = orjson.loads((folder / RESULT_FILE).read_bytes())
        panel = Panel(
            environment=record["env"],
            policy=record["policy"],
            model=record["model"],
            n_tasks=record["n_tasks"],
            samples=record["samples"],
            seed=record["seed"],
            settings=record["settings"],
        )
        seconds, speed = float(record["seconds"]), float(record["tokens_per_s"])
    except (OSError, *UNREADABLE) as error:
        raise UsageError(
            f"evaluation {folder} has no result that can be read",
            got=f"{type(error).__name__}: {error}",
            hint="the same agentrl eval command finishes it",
        ) from error
    episodes = list(stored_episodes(folder / EPISODES_FILE).values())
    return replace(summarise(panel, episodes, seconds), tokens_per_s=speed)
