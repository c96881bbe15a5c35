"""`agentrl export`: a run's model as a Hugging Face folder of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl.assembly.models import SHARD_SIZE, write_merged
from agentrl.cli.console import note
from agentrl.cli.help import examples
from agentrl.errors import UsageError
from agentrl.observe.disk import writing
from agentrl.observe.model_folder import find_model
from agentrl.training.checkpoint import system_errors
from agentrl.training.models.lora import is_adapter_folder

Format = Literal["float32", "bfloat16"]

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl export runs/latest my-model",
        "agentrl export runs/latest/checkpoints/step-000040 my-model",
        "agentrl export runs/latest my-adapter --adapter",
    )
)
def export(
    run: Annotated[str, typer.Argument(help="A run (its newest checkpoint), or one checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write; must not be there yet.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Write a LoRA run's adapter alone, as peft does.")] = False,
    dtype: Annotated[Format, typer.Option(help="Number format of merged weights.")] = "float32",
    shard_size: Annotated[str, typer.Option(help="Of the largest file of merged weights.")] = SHARD_SIZE,
) -> None:
    """Write a run's model as a Hugging Face checkpoint: weights, config, tokenizer, chat template."""
    source = Path(find_model(run))
    if not source.is_dir():
        raise UsageError(f"{run} is no run or checkpoint", expected="a folder such as runs/latest")
    is_adapter = is_adapter_folder(source)
    if adapter and not is_adapter:
        raise UsageError(
            f"{run} has no adapter", got="a whole model", expected="a run with model.lora", hint="leave out --adapter"
        )
    if folder.exists():
        raise UsageError(f"{folder} is there already", hint="choose another folder, or delete it first")
    partial = folder.with_name(folder.name + ".partial")
    with writing(folder):
        shutil.rmtree(partial, ignore_errors=True)
        if is_adapter and not adapter:
            with system_errors():
                write_merged(str(source), partial, dtype=dtype, shard_size=shard_size)
        else:
            shutil.copytree(source, partial)
        partial.rename(folder)
    note(f"wrote {folder} from {source}")
