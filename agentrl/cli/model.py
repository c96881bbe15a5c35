"""`agentrl model`: models that have a name on this machine."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from agentrl.cli.help import examples
from agentrl.errors import UsageError
from agentrl.models.gguf import load_gguf
from agentrl.observe.console import note, out
from agentrl.observe.files import writing
from agentrl.observe.model_folder import added_models, find_model, models_folder
from agentrl.training.checkpoint import save_model_folder

app = typer.Typer(no_args_is_help=True)


@app.command(
    epilog=examples(
        "agentrl model add SmolLM2-135M-Instruct.Q4_1.gguf smollm2-135m-instruct",
        "agentrl model add runs/latest my-model",
        "agentrl train quickstart model.path=my-model",
    )
)
def add(
    source: Annotated[str, typer.Argument(help="A GGUF file, a Hugging Face folder, a checkpoint or a run.")],
    name: Annotated[str, typer.Argument(help="What model.path calls it from now on.")],
    replace: Annotated[bool, typer.Option("--replace", help="Take the place of a model of that name.")] = False,
) -> None:
    """Keep a model in the user's cache, under a name for model.path; a GGUF file is converted to float32."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UsageError("this is no name for a model", got=repr(name), expected="letters, digits, dots, - and _")
    folder = models_folder() / name
    if folder.exists() and not replace:
        raise UsageError(f"there is a model {name} already", got=folder, hint="choose another name, or add --replace")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.partial-", dir=folder.parent) as place:
            partial = Path(place) / name
            if source.lower().endswith(".gguf"):
                model, tokenizer = load_gguf(Path(source))
                save_model_folder(model, tokenizer, partial)
            else:
                shutil.copytree(_folder_of(source), partial)
            if folder.exists():
                folder.rename(Path(place) / "replaced")
            partial.rename(folder)
    note(f"added {name}: agentrl train … model.path={name}")


def _folder_of(source: str) -> Path:
    found = Path(find_model(source))
    if not found.is_dir():
        raise UsageError(
            f"there is no model in {source}",
            got="no such file or folder",
            expected="a GGUF file, a Hugging Face folder, a checkpoint or a run",
            hint="a name on the hub needs no adding: model.path takes it",
        )
    return found


@app.command("list", epilog=examples("agentrl model list"))
def list_() -> None:
    """See the models that were added."""
    found = added_models()
    if not found:
        out.print(f"no model was added yet, in {models_folder()}: agentrl model add PATH NAME")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "size", "folder"):
        table.add_column(column, overflow="fold")
    for folder in found:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        table.add_row(folder.name, f"{size / 1e6:,.0f} MB", str(folder))
    out.print(table)
