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
from agentrl.runs.demo import AFTER, AS_IT_COMES, BEFORE, JSON_FILE, RECIPE, Demo, DemoRunner

MODEL_RECIPE = "smollm2/python_math"
_WHEN = {
    AS_IT_COMES: "of the model as it comes:",
    BEFORE: "on unseen tasks before training:",
    AFTER: "on unseen tasks after training: ",
}

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl demo",
        "agentrl demo --seed 1 --folder runs/my-demo",
        "agentrl demo trainer.steps=20 sft.episodes=1000",
        "agentrl demo --model smollm2-135m-instruct",
        "agentrl demo --model smollm2-135m-instruct --recipe smollm2/blackjack",
    )
)
def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes of the recipe.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A pretrained language model, by name or folder.", show_default=False)
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"The config to run: a file or a shipped one; {RECIPE}, or {MODEL_RECIPE} with --model.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model, the tasks and the sampling.")] = 0,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Unseen tasks of each evaluation; the recipe's number when left out.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where everything goes; runs/demo-TIME when left out.", show_default=False)
    ] = None,
) -> None:
    """Watch a small agent learn household tasks, from nothing.

    Makes a small model, warm-starts it on expert episodes, measures it in unseen rooms, trains it by reward with GiGPO,
    and measures it again. Needs no network and no GPU. Fails when the agent did not learn. With --model, a pretrained
    language model is measured as it comes, and learns what the recipe says.
    """
    place = folder or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    words = [*([] if model is None else [f"model.path={model}"]), *(overrides or [])]
    chosen = recipe or (RECIPE if model is None else MODEL_RECIPE)
    with watching() as watcher:
        found = DemoRunner(place, recipe=chosen, seed=seed, n_tasks=tasks, overrides=words, watcher=watcher).run()
    print_demo(found)
    found.check_learned()


def print_demo(found: Demo) -> None:
    """The result in a few lines, and where to read on."""
    for when, result in found.results.items():
        out.print(f"success {_WHEN[when]} {_success(result)}")
    out.print(f"{found.seconds.get('warm_start', 0) + found.seconds['training']:.0f} s of warm start and training")
    note(f"report: {found.report.html}\nnumbers: {found.folder / JSON_FILE}")


def _success(result: EvaluationResult) -> str:
    estimate = "unknown" if result.success is None else estimate_text(result.success)
    return f"{estimate} on {result.panel.n_tasks} tasks"
