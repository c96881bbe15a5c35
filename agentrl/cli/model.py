"""`agentrl model`: check models, and add models to this user's cache under a name."""

from __future__ import annotations

import re
import shutil
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from agentrl.cli.help import examples
from agentrl.cli.model_check import check
from agentrl.errors import UsageError
from agentrl.models.gguf import load_gguf
from agentrl.observe.console import note, out
from agentrl.observe.files import writing
from agentrl.observe.model_folder import added_models, find_model, models_folder
from agentrl.training.checkpoint import save_model_folder

app = typer.Typer(no_args_is_help=True)


app.command(
    epilog=examples(
        "agentrl model check qwen2.5-coder-0.5b-instruct --env guess_number",
        "agentrl model check Qwen/Qwen2.5-0.5B-Instruct --env household --env webshop --engine vllm",
        "agentrl model check runs/latest --env my_game:GuessNumber-v0 --answers 64 --json check.json",
    )
)(check)


class Format(StrEnum):
    """Number format of a converted model."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@app.command(
    epilog=examples(
        "agentrl model add SmolLM2-135M-Instruct.Q4_1.gguf smollm2-135m-instruct",
        "agentrl model add runs/latest my-model",
        "agentrl model add Qwen2.5-0.5B-Instruct-Q4_K_M.gguf qwen --dtype float32",
        "agentrl train quickstart model.path=my-model",
    )
)
def add(
    source: Annotated[str, typer.Argument(help="GGUF file, Hugging Face folder, checkpoint or run.")],
    name: Annotated[str, typer.Argument(help="Name of the model for model.path.")],
    replace: Annotated[bool, typer.Option("--replace", help="Replace a model with this name.")] = False,
    dtype: Annotated[
        Format,
        typer.Option(
            "--dtype",
            help="Number format of a converted GGUF file; auto: bfloat16 below 8 bits per weight, else float32.",
        ),
    ] = Format.AUTO,
) -> None:
    """Add a model to this user's cache, under a name for model.path; a GGUF file is converted."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UsageError(
            "this is not a valid name for a model", got=repr(name), expected="letters, digits, dots, - and _"
        )
    folder = models_folder() / name
    if folder.exists() and not replace:
        raise UsageError(f"model {name} already exists", got=folder, hint="choose another name, or add --replace")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.partial-", dir=folder.parent) as place:
            partial = Path(place) / name
            if source.lower().endswith(".gguf"):
                _convert(Path(source), partial, dtype)
            else:
                shutil.copytree(_folder_of(source), partial)
            if folder.exists():
                folder.rename(Path(place) / "replaced")
            partial.rename(folder)
    note(f"added {name}: agentrl model check {name}, then agentrl train … model.path={name}")


def _convert(file: Path, folder: Path, dtype: Format) -> None:
    loaded = load_gguf(file, dtype=dtype.value)
    model = loaded.model
    if loaded.retied is not None:
        note(
            f"tied the output head to the embedding again: the file holds two copies of one matrix, which differ by "
            f"{loaded.retied:.1%} because of quantization"
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    number_format = str(model.dtype).removeprefix("torch.")
    note(
        f"{parameters / 1e6:,.0f} million parameters, stored in {number_format} "
        f"(the file has {loaded.bits_per_weight:.1f} bits per weight)"
    )
    save_model_folder(model, loaded.tokenizer, folder)


def _folder_of(source: str) -> Path:
    found = Path(find_model(source))
    if not found.is_dir():
        raise UsageError(
            f"no model found in {source}",
            got="no such file or folder",
            expected="a GGUF file, a Hugging Face folder, a checkpoint or a run",
            hint="a name on the hub does not have to be added: set model.path to it",
        )
    return found


@app.command("list", epilog=examples("agentrl model list"))
def list_() -> None:
    """List the added models."""
    found = added_models()
    if not found:
        out.print(f"no models in {models_folder()}; add one: agentrl model add PATH NAME")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "size", "folder"):
        table.add_column(column, overflow="fold")
    for folder in found:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        table.add_row(folder.name, f"{size / 1e6:,.0f} MB", str(folder))
    out.print(table)
