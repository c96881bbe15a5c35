"""`agentrl export`: a run's model as a Hugging Face folder or repository."""

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
from agentrl.cli.evaluations import own_evaluations
from agentrl.cli.help_pages import examples
from agentrl.cli.reports import read_reported_run
from agentrl.errors import UsageError
from agentrl.evaluation.model_card import CARD, model_card
from agentrl.evaluation.run_report import config_of
from agentrl.models.lora import ADAPTERS, adapter_folder, adapters_in, is_adapter_folder
from agentrl.observe.console import note
from agentrl.observe.files import writing
from agentrl.observe.model_folder import find_model
from agentrl.observe.run_folder import RUN_OR_CHECKPOINT, find_run, missing_run_error
from agentrl.runs.start import warn_changed_base
from agentrl.training.checkpoint import system_errors

Format = Literal["float32", "bfloat16"]
HUB = "hub://"
"""Prefix of repositories on the Hugging Face hub."""

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
    run: Annotated[str, typer.Argument(help="Run (its newest checkpoint is used), or a checkpoint.")],
    target: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|hub://OWNER/NAME",
            help="New folder to write, or repository on the Hugging Face hub to push to.",
        ),
    ],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only a LoRA run's adapters, in PEFT's format, one folder for each.")
    ] = False,
    dtype: Annotated[
        Format | None, typer.Option(help="Data type of the weights; default: the run's, or float32 if merged.")
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option(help="Maximum file size, such as 5GB; default: the run's, or 5GB if merged.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository on the hub public.")] = False,
) -> None:
    """Write a run's model as a Hugging Face checkpoint: weights, config, tokenizer, chat template, model card."""
    _check_shard_size(shard_size)
    repository = _repository(target)
    if public and repository is None:
        raise UsageError("--public needs a repository on the hub", got=target, expected="hub://OWNER/NAME")
    folder = Path(target)
    source = Path(find_model(run))
    if not source.is_dir():
        raise missing_run_error(run, RUN_OR_CHECKPOINT)
    is_adapter, several = is_adapter_folder(source), adapters_in(source)
    if several and not adapter:
        raise UsageError(
            f"{run} has several adapters, which cannot be merged into one model",
            got=", ".join(several),
            expected="--adapter, which writes a folder for each adapter",
            hint="or merge one of them: "
            + shlex.join(["agentrl", "export", str(adapter_folder(source, several[0])), target]),
        )
    if adapter and not (is_adapter or several):
        raise UsageError(
            f"{run} has no adapter", got="a whole model", expected="a run with model.lora", hint="remove --adapter"
        )
    is_rewritten = dtype is not None or shard_size is not None or (is_adapter and not adapter)
    if adapter and is_rewritten:
        raise UsageError(
            "adapters are copied without changes",
            got="--dtype or --shard-size",
            expected="only --adapter, or merged weights without --adapter",
        )
    if repository is None and folder.exists():
        raise UsageError(f"{folder} already exists", hint="choose another folder, or delete it first")
    if (is_adapter or several) and (trained := find_run(source)) and (config := config_of(trained)):
        warn_changed_base(trained, config)
    own: Format = "float32" if is_adapter else _format_of(source)
    form = WeightFormat(dtype or own, shard_size or SHARD_SIZE) if is_rewritten else None
    files = source / ADAPTERS if several else source
    if repository is not None:
        with tempfile.TemporaryDirectory(prefix="agentrl-export-") as temporary:
            _write(files, Path(temporary) / "model", form)
            _write_card(run, Path(temporary) / "model", is_adapter=adapter)
            address = push(Path(temporary) / "model", repository, is_public=public)
        note(f"pushed {source} to {address}")
        return
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.partial-", dir=folder.parent) as temporary:
            partial = Path(temporary) / folder.name
            _write(files, partial, form)
            _write_card(run, partial, is_adapter=adapter)
            partial.rename(folder)
    note(f"wrote {folder} from {source}")


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Data type and file size of weights that are rewritten."""

    dtype: Format
    shard_size: str


def _write(source: Path, folder: Path, form: WeightFormat | None) -> None:
    """Copy a model's files, or write the weights in another format."""
    if form is None:
        shutil.copytree(source, folder)
        return
    with system_errors():
        write_merged(str(source), folder, dtype=form.dtype, shard_size=form.shard_size)


def _write_card(run: str, folder: Path, *, is_adapter: bool) -> None:
    """Write the model card if the model belongs to a run; an existing card is kept."""
    found = find_run(run)
    if found is None or (folder / CARD).exists():
        return
    reported = read_reported_run(found)
    card = model_card(reported, own_evaluations(found), is_adapter=is_adapter)
    (folder / CARD).write_text(card, encoding="utf-8")


def _repository(target: str) -> str | None:
    """Return the repository of ``hub://OWNER/NAME``; ``None`` for a folder."""
    if not target.startswith(HUB):
        return None
    name = target.removeprefix(HUB).rstrip("/")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UsageError(f"{target} is not a repository on the hub", expected="hub://OWNER/NAME")
    return name


def push(folder: Path, repository: str, *, is_public: bool = False) -> str:
    """Push a model's folder to a repository on the Hugging Face hub, which is created if needed; return its address.

    Raises:
        UsageError: no token, no write permission, or no connection.
    """
    try:
        api = HfApi()
        api.create_repo(repository, private=not is_public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Add a model trained with agentrl")
    except Exception as error:  # the library raises many types, and so does its HTTP library
        raise UsageError(
            f"cannot push to {repository} on the Hugging Face hub",
            got=(str(error).strip() or type(error).__name__).splitlines()[0],
            expected="a token with write permission, and a connection",
            hint="log in with: hf auth login; or write a folder and upload it yourself",
        ) from error
    return f"{constants.ENDPOINT}/{repository}"


def _check_shard_size(text: str | None) -> None:
    found = None if text is None else re.fullmatch(r"(\d+(?:\.\d+)?)[KMGT]B", text.upper())
    if text is not None and (found is None or not float(found[1])):
        raise UsageError("--shard-size is not a file size", got=repr(text), expected="such as 5GB or 500MB")


def _format_of(model: Path) -> Format:
    """Return the data type of a model's files."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return "bfloat16" if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")) else "float32"
