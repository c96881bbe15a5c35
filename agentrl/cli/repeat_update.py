"""`agentrl repeat-update`: repeat an update that was skipped because it was not finite, and diagnose it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from agentrl.builders.models import load_images
from agentrl.cli.help_pages import examples
from agentrl.observe.console import note, out
from agentrl.training.diagnostics.repeated_update import RepeatedUpdate, repeat_update
from agentrl.training.diagnostics.watch import read_dump

app = typer.Typer()


@app.command("repeat-update", epilog=examples("agentrl repeat-update runs/latest/numerics/step-000012-update-1.pt"))
def repeat_update_command(
    file: Annotated[Path, typer.Argument(help="File from the folder numerics of a run.")],
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Repeat a skipped update: show losses, the first module whose values are not finite, and gradient norms."""
    state = read_dump(file)
    has_images = '"images"' in state["trajectories"]
    path = json.loads(state["config"])["model"]["path"]
    found = repeat_update(state, device=device, image_processor=load_images(path) if has_images else None)
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(found), "repeats": found.repeats}, indent=2))
        return
    _show(found)


def _show(found: RepeatedUpdate) -> None:
    batches = Table("micro-batch", "trajectories", "tokens", "loss", "not finite", box=None, pad_edge=False)
    for number, each in enumerate(found.micro_batches):
        cells = (str(number), ", ".join(each.trajectories), f"{each.tokens:,}", f"{each.loss:.6g}")
        batches.add_row(*cells, ", ".join(each.not_finite) or "-")
    out.print(batches)
    norms = Table("gradients", "norm now", "norm in the run", box=None, pad_edge=False)
    for group in sorted({*found.now.group_norms, *found.recorded.group_norms}):
        now, then = (each.group_norms.get(group, math.nan) for each in (found.now, found.recorded))
        norms.add_row(group, f"{now:.6g}", f"{then:.6g}")
    out.print(norms)
    for line in lines(found):
        out.print(line)
    note(
        "all numbers are bitwise equal to the run's"
        if found.repeats
        else "the numbers differ from the run's: see the table"
    )


def lines(found: RepeatedUpdate) -> list[str]:
    """Return the findings, most informative first."""
    texts = []
    if found.weights_not_finite:
        texts.append(f"weights that are not finite before the update: {', '.join(found.weights_not_finite)}")
    if found.first_forward is not None:
        texts.append(f"first output that is not finite: {found.first_forward}")
    elif any(each.not_finite for each in found.micro_batches):
        texts.append("all outputs of modules are finite: the cause is in the output head or the loss")
    if found.first_backward is not None:
        texts.append(f"first gradient that is not finite: {found.first_backward}")
    if not texts:
        texts.append("all outputs of modules are finite" + ("" if found.now.non_finite else ": no problem found"))
    if found.now.non_finite:
        texts.append(f"not finite after the update: {', '.join(found.now.non_finite)}")
    return texts
