"""`agentrl export`: a run's model as a Hugging Face folder of its own."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from huggingface_hub import HfApi, constants

from agentrl.builders.models import SHARD_SIZE, write_merged
from agentrl.cli.help import examples
from agentrl.errors import UsageError
from agentrl.models.lora import ADAPTERS, adapter_folder, adapters_in, is_adapter_folder
from agentrl.observe.console import note
from agentrl.observe.files import writing
from agentrl.observe.model_folder import find_model
from agentrl.training.checkpoint import system_errors

Format = Literal["float32", "bfloat16"]
HUB = "hub://"
"""Begins the name of a repository on the Hugging Face hub."""

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl export runs/latest my-model",
        "agentrl export runs/latest/checkpoints/step-000040 my-model",
        "agentrl export runs/latest my-adapter --adapter",
        "agentrl export runs/latest hub://my-name/my-model",
    )
)
def export(
    run: Annotated[str, typer.Argument(help="A run (its newest checkpoint), or one checkpoint.")],
    target: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|hub://OWNER/NAME",
            help="The folder to write, which must not exist yet; or a repository of the Hugging Face hub to push to.",
        ),
    ],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write a LoRA run's adapter alone, as peft does; of several, each.")
    ] = False,
    dtype: Annotated[
        Format | None, typer.Option(help="Number format of the weights; the run's own, or float32 of merged ones.")
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(help="Of the largest file, such as 5GB; as the run's own, or 5GB of merged weights.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Let a new repository of the hub be public.")] = False,
) -> None:
    """Write a run's model as a Hugging Face checkpoint: weights, config, tokenizer, chat template."""
    _check_shard_size(shard_size)
    repository = _repository(target)
    if public and repository is None:
        raise UsageError("--public is for a repository of the hub", got=target, expected="hub://OWNER/NAME")
    folder = Path(target)
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
            + shlex.join(["agentrl", "export", str(adapter_folder(source, several[0])), target]),
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
    if repository is None and folder.exists():
        raise UsageError(f"{folder} is there already", hint="choose another folder, or delete it first")
    own: Format = "float32" if is_adapter else _format_of(source)
    anew = Rewritten(dtype or own, shard_size or SHARD_SIZE) if is_written_anew else None
    files = source / ADAPTERS if several else source
    if repository is not None:
        with tempfile.TemporaryDirectory(prefix="agentrl-export-") as place:
            _write(files, Path(place) / "model", anew)
            address = push(Path(place) / "model", repository, is_public=public)
        note(f"pushed {source} to {address}")
        return
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.partial-", dir=folder.parent) as place:
            partial = Path(place) / folder.name
            _write(files, partial, anew)
            partial.rename(folder)
    note(f"wrote {folder} from {source}")


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Form in which weights are written anew."""

    dtype: Format
    shard_size: str


def _write(source: Path, folder: Path, anew: Rewritten | None) -> None:
    """Write a model's files, as they are or in another form."""
    if anew is None:
        shutil.copytree(source, folder)
        return
    with system_errors():
        write_merged(str(source), folder, dtype=anew.dtype, shard_size=anew.shard_size)


def _repository(target: str) -> str | None:
    """Return the repository that ``hub://OWNER/NAME`` names; ``None`` for a folder."""
    if not target.startswith(HUB):
        return None
    name = target.removeprefix(HUB).rstrip("/")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UsageError(f"{target} names no repository of the hub", expected="hub://OWNER/NAME")
    return name


def push(folder: Path, repository: str, *, is_public: bool = False) -> str:
    """Push a model's folder to a repository of the Hugging Face hub, which is made if needed; return its address.

    Raises:
        UsageError: no token, no right to write there, or no connection.
    """
    try:
        api = HfApi()
        api.create_repo(repository, private=not is_public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Add a model trained with agentrl")
    except Exception as error:  # the library has many, and those of its network library
        raise UsageError(
            f"cannot push to {repository} on the Hugging Face hub",
            got=(str(error).strip() or type(error).__name__).splitlines()[0],
            expected="a token that may write there, and a connection",
            hint="log in with: hf auth login; or write a folder and upload it yourself",
        ) from error
    return f"{constants.ENDPOINT}/{repository}"


def _check_shard_size(text: str | None) -> None:
    found = None if text is None else re.fullmatch(r"(\d+(?:\.\d+)?)[KMGT]B", text.upper())
    if text is not None and (found is None or not float(found[1])):
        raise UsageError("--shard-size is no size of a file", got=repr(text), expected="such as 5GB or 500MB")


def _format_of(model: Path) -> Format:
    """The number format of a model's files."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return "bfloat16" if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")) else "float32"
