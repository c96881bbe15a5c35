"""`agentrl export`: a run's model as a Hugging Face folder of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.console import note
from agentrl.cli.help import examples
from agentrl.errors import UsageError
from agentrl.observe.disk import writing
from agentrl.observe.model_folder import find_model

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl export runs/latest my-model",
        "agentrl export runs/latest/checkpoints/step-000040 my-model",
    )
)
def export(
    run: Annotated[str, typer.Argument(help="A run (its newest checkpoint), or one checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; must not be there yet.")],
) -> None:
    """Write a run's model as a Hugging Face checkpoint: weights, config, tokenizer, chat template."""
    source = Path(find_model(run))
    if not source.is_dir():
        raise UsageError(f"{run} is no run or checkpoint", expected="a folder such as runs/latest")
    if folder.exists():
        raise UsageError(f"{folder} is there already", hint="choose another folder, or delete it first")
    partial = folder.with_name(folder.name + ".partial")
    with writing(folder):
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
        partial.rename(folder)
    note(f"wrote {folder} from {source}")
