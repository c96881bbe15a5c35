"""`agentrl demo`: warm start, training and evaluation of a small agent, with a report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.help_pages import examples
from agentrl.evaluation.result import EvaluationResult, estimate_text
from agentrl.observe.console import note, out
from agentrl.observe.terminal import watching
from agentrl.runs.demo import AFTER, AS_IT_COMES, BEFORE, JSON_FILE, RECIPE, Demo, DemoRunner

MODEL_RECIPE = "smollm2/python_math"
_WHEN = {
    AS_IT_COMES: "of the unchanged model:",
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
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the recipe.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name or folder of a pretrained language model.", show_default=False)
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"Config file or shipped config; default {RECIPE}, or {MODEL_RECIPE} with --model.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model, the tasks and the sampling.")] = 0,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Unseen tasks per evaluation; default: the recipe's number.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Output folder; default runs/demo-TIME.", show_default=False)
    ] = None,
) -> None:
    """Train a small agent from scratch on household tasks.

    Creates a small model, warm-starts it on expert episodes, measures it in unseen rooms, trains it with GiGPO, and
    measures it again. Needs no network and no GPU. Fails if the agent does not learn. With --model, measures a
    pretrained language model first, then trains it with the recipe.
    """
    target = folder or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    words = [*([] if model is None else [f"model.path={model}"]), *(overrides or [])]
    chosen = recipe or (RECIPE if model is None else MODEL_RECIPE)
    found = DemoRunner(target, recipe=chosen, seed=seed, n_tasks=tasks, overrides=words, watching=watching).run()
    print_demo(found)
    found.check_learned()


def print_demo(found: Demo) -> None:
    """Print the result in a few lines, and the paths of the report and the numbers."""
    for when, result in found.results.items():
        out.print(f"success {_WHEN[when]} {_success(result)}")
    out.print(f"{found.seconds.get('warm_start', 0) + found.seconds['training']:.0f} s of warm start and training")
    note(f"report: {found.report.html}\nnumbers: {found.folder / JSON_FILE}")


def _success(result: EvaluationResult) -> str:
    estimate = "unknown" if result.success is None else estimate_text(result.success)
    return f"{estimate} on {result.panel.n_tasks} tasks"
