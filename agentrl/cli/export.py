"""`agentrl export`: a run's model as a Hugging Face folder of its own."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl.builders.models import SHARD_SIZE, write_merged
from agentrl.cli.help import examples
from agentrl.errors import UsageError
from agentrl.models.lora import ADAPTERS, adapter_folder, adapters_in, is_adapter_folder
from agentrl.observe.console import note
from agentrl.observe.files import writing
from agentrl.observe.model_folder import find_model
from agentrl.training.checkpoint import system_errors

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
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write a LoRA run's adapter alone, as peft does; of several, each.")
    ] = False,
    dtype: Annotated[
        Format | None, typer.Option(help="Number format of the weights; the run's own, or float32 of merged ones.")
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(help="Of the largest file, such as 5GB; as the run's own, or 5GB of merged weights.")
    ] = None,
) -> None:
    """Write a run's model as a Hugging Face checkpoint: weights, config, tokenizer, chat template."""
    _check_shard_size(shard_size)
    source = Path(find_model(run))
    if not source.is_dir():
        raise UsageError(f"{run} is no run or checkpoint", expected="a folder such as runs/latest")
    is_adapter, several = is_adapter_folder(source), adapters_in(source)
    if several and not adapter:
        raise UsageError(
            f"{run} has several adapters, which cannot be merged into one model",
            got=", ".join(several),
            expected="--adapter, which writes a folder of each",
            hint="or merge one of them: "
            + shlex.join(["agentrl", "export", str(adapter_folder(source, several[0])), str(folder)]),
        )
    if adapter and not (is_adapter or several):
        raise UsageError(
            f"{run} has no adapter", got="a whole model", expected="a run with model.lora", hint="leave out --adapter"
        )
    is_written_anew = dtype is not None or shard_size is not None or (is_adapter and not adapter)
    if adapter and is_written_anew:
        raise UsageError(
            "an adapter alone is copied as it is",
            got="--dtype or --shard-size",
            expected="--adapter alone, or merged weights without it",
        )
    if folder.exists():
        raise UsageError(f"{folder} is there already", hint="choose another folder, or delete it first")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.partial-", dir=folder.parent) as place:
            partial = Path(place) / folder.name
            if is_written_anew:
                with system_errors():
                    own: Format = "float32" if is_adapter else _format_of(source)
                    write_merged(str(source), partial, dtype=dtype or own, shard_size=shard_size or SHARD_SIZE)
            else:
                shutil.copytree(source / ADAPTERS if several else source, partial)
            partial.rename(folder)
    note(f"wrote {folder} from {source}")


def _check_shard_size(text: str | None) -> None:
    found = None if text is None else re.fullmatch(r"(\d+(?:\.\d+)?)[KMGT]B", text.upper())
    if text is not None and (found is None or not float(found[1])):
        raise UsageError("--shard-size is no size of a file", got=repr(text), expected="such as 5GB or 500MB")


def _format_of(model: Path) -> Format:
    """The number format of a model's files."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return "bfloat16" if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")) else "float32"
