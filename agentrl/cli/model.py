"""`agentrl model`: check how usable a model's answers are, and add models to this user's cache under a name."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from agentrl.cli.help_pages import examples
from agentrl.config import load_config
from agentrl.config.estimate import shown_bytes
from agentrl.config.overrides import text_override
from agentrl.errors import UsageError, did_you_mean
from agentrl.evaluation.model_check import TEXT_LOOP, TOOL_LOOP, ModelCheck, check_model
from agentrl.models.gguf import load_gguf
from agentrl.observe.console import note, out
from agentrl.observe.files import check_writable, replace_file, writing
from agentrl.observe.model_folder import added_models, find_model, models_folder
from agentrl.runs.stop import run_until_stopped
from agentrl.training.checkpoint import save_model_folder

app = typer.Typer(no_args_is_help=True)
REPLACED = ("agent.loop=", "agent.options", "agent.few_shot_turns=")
"""Settings that a check chooses."""
ENVIRONMENT = "guess_number"
"""Default environment."""


@app.command(
    epilog=examples(
        "agentrl model check qwen2.5-coder-0.5b-instruct --env guess_number",
        "agentrl model check Qwen/Qwen2.5-0.5B-Instruct --env household --env webshop --engine vllm",
        "agentrl model check runs/latest --env my_game:GuessNumber-v0 --answers 64 --json check.json",
    )
)
def check(
    name: Annotated[str, typer.Argument(help="Model folder or name, run, or checkpoint.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys: engine, sampling, environment.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help=f"Environment whose tasks the model answers; may be repeated. Default: {ENVIRONMENT}."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="local, vllm or sglang.")] = None,
    loop: Annotated[
        list[str] | None, typer.Option(help=f"Try only this agent loop ({TOOL_LOOP} or {TEXT_LOOP}); may be repeated.")
    ] = None,
    answers: Annotated[
        int, typer.Option(min=4, help="Number of first answers to sample with each combination of settings.")
    ] = 24,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Check a model before the first run: template, share of usable answers, speed, agreement of engine and trainer.

    Samples a few dozen first answers as tool calls and as text, recommends settings, and saves them: `agentrl train`
    and `agentrl eval` use them for this model and environment unless you choose an agent loop.
    """
    if json_file is not None:
        check_writable(json_file)
    loops = tuple(loop or (TOOL_LOOP, TEXT_LOOP))
    for wrong in set(loops) - {TOOL_LOOP, TEXT_LOOP}:
        hint = did_you_mean(wrong, (TOOL_LOOP, TEXT_LOOP))
        raise UsageError(
            "model check does not try this loop", got=wrong, expected=f"{TOOL_LOOP} or {TEXT_LOOP}", hint=hint
        )
    found = []
    for environment in env or [ENVIRONMENT]:
        settings = ["model.dtype=auto", *([f"engine={engine}"] if engine else [])]
        settings += [] if temperature is None else [f"sampling.temperature={temperature}"]
        settings += words or []
        config = load_config(
            None, [text_override("environment", environment), text_override("model.path", name), *settings]
        )
        result = run_until_stopped(check_model(config, answers=answers, loops=loops, say=note))
        kept = [word for word in settings if not word.startswith(REPLACED)]
        _print(result, ["agentrl", "train", "--env", environment, "--model", name, *kept])
        found.append(result.to_json())
    if json_file is not None:
        replace_file(json_file, (json.dumps(found, indent=2) + "\n").encode())
        note(f"wrote {json_file}")


def _print(found: ModelCheck, command: list[str]) -> None:
    """Print a result; `command` trains the model, without the recommended settings."""
    out.print(Text(f"{found.model} in {found.environment}", style="bold"))
    _print_template(found)
    _print_answers(found)
    fastest = max(share.tokens_per_s for share in found.shares)
    out.print(f"speed: {fastest:,.0f} sampled tokens/s; peak memory: {shown_bytes(found.peak_bytes)} ({found.dtype})")
    if (agreement := found.agreement) is not None:
        out.print(
            f"engine and trainer: mean |pi - mu| {agreement.mean:.1e}, largest {agreement.largest:.1e}, "
            f"over {agreement.tokens:,} sampled tokens"
        )
    if found.recommended is None:
        out.print("no settings gave a usable answer: try another model, or a supervised start (docs/warm-start.md)")
        return
    for loop, share in found.best.items():
        out.print(f"best with {loop} ({share.usable:.0%}): {share.settings}", soft_wrap=True)
    out.print(Text("recommended", style="bold"), f"({found.recommended.usable:.0%} usable)")
    out.print(f"  {shlex.join(command)} {found.recommended.settings}", soft_wrap=True)
    out.print("train and eval use these settings for this model and environment unless you set agent.loop")


def _print_template(found: ModelCheck) -> None:
    facts = found.template
    calls = f"tool calls in {facts.tool_parser} format" if facts.tool_parser else "no tool calls"
    out.print(f"chat template: family {facts.family}, {calls}; a turn ends at {' or '.join(facts.end_of_turn)}")
    for fault in facts.faults:
        out.print(Text(f"  fault: {fault}", style="yellow"))
    if not facts.faults:
        found_tools = "it renders tools and calls, and" if facts.tool_parser else "it"
        out.print(f"  no fault found: {found_tools} only appends to earlier turns")


def _print_answers(found: ModelCheck) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("settings", overflow="fold")
    for column in ("usable", "repaired", "accepted", "answers", "prompt tokens"):
        table.add_column(column, justify="right")
    for share in found.shares:
        shares = (f"{value:.0%}" for value in (share.usable, share.repaired, share.accepted))
        table.add_row(str(share.settings), *shares, str(share.answers), f"{share.prompt_tokens:,.0f}")
    out.print(table)
    unusable = [entry for share in found.shares for entry in share.unusable]
    if unusable:
        out.print("most frequent unusable answers:")
    for count, text in sorted(unusable, reverse=True)[:3]:
        out.print(Text(f"  {count} x {json.dumps(text, ensure_ascii=False)}"))


class Format(StrEnum):
    """Data type of a converted model."""

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
            help="Data type of a converted GGUF file; auto: bfloat16 below 8 bits per weight, else float32.",
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
        with tempfile.TemporaryDirectory(prefix=f".{name}.partial-", dir=folder.parent) as temporary:
            partial = Path(temporary) / name
            if source.lower().endswith(".gguf"):
                _convert(Path(source), partial, dtype)
            else:
                shutil.copytree(_folder_of(source), partial)
            if folder.exists():
                folder.rename(Path(temporary) / "replaced")
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
