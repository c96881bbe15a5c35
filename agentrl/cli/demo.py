"""`agentrl demo`: the main job, from nothing to a report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.help import examples
from agentrl.evaluation.result import EvaluationResult, estimate_text
from agentrl.observe.console import note, out
from agentrl.observe.terminal import watching
from agentrl.runs.demo import JSON_FILE, Demo, DemoRunner

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl demo",
        "agentrl demo --seed 1 --folder runs/my-demo",
        "agentrl demo trainer.steps=20 sft.episodes=1000",
    )
)
def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes of the quickstart config.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model, the tasks and the sampling.")] = 0,
    tasks: Annotated[int, typer.Option(min=1, help="Unseen tasks of each evaluation.")] = 256,
    folder: Annotated[
        Path | None, typer.Option(help="Where everything goes; runs/demo-TIME when left out.", show_default=False)
    ] = None,
) -> None:
    """Watch a small agent learn household tasks, from nothing.

    Makes a small model, warm-starts it on expert episodes, measures it in unseen rooms, trains it by reward with GiGPO,
    and measures it again. Needs no network and no GPU. Fails when the agent did not learn.
    """
    place = folder or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    with watching() as watcher:
        found = DemoRunner(place, seed=seed, n_tasks=tasks, overrides=overrides or [], watcher=watcher).run()
    print_demo(found)
    found.check_learned()


def print_demo(found: Demo) -> None:
    """The result in a few lines, and where to read on."""
    out.print(f"success in unseen rooms before training: {_success(found.before)}")
    out.print(f"success in unseen rooms after training:  {_success(found.after)}")
    out.print(f"{found.seconds['warm_start'] + found.seconds['training']:.0f} s of warm start and training")
    note(f"report: {found.report.html}\nnumbers: {found.folder / JSON_FILE}")


def _success(result: EvaluationResult) -> str:
    estimate = "unknown" if result.success is None else estimate_text(result.success)
    return f"{estimate} on {result.panel.n_tasks} tasks"
