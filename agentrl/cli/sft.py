"""`agentrl sft`: a warm start on the expert's demonstrations."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from agentrl.builders.checks import check_warm_start
from agentrl.builders.run import Run, start_run
from agentrl.builders.workers import follow_launcher, follows_launcher
from agentrl.cli.arguments import read_config, shortcut
from agentrl.cli.exits import told_when_interrupted
from agentrl.cli.help import examples
from agentrl.cli.train import Words, print_dry_run
from agentrl.config import shipped_configs
from agentrl.config.estimate import warm_start_rows
from agentrl.observe.console import note
from agentrl.observe.terminal import watching
from agentrl.runs.sft import warm_start

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl sft quickstart",
        "agentrl sft quickstart sft.episodes=500 --dry-run",
        "agentrl sft --env household --model Qwen/Qwen2.5-0.5B-Instruct",
        "agentrl sft --data chats.jsonl --model Qwen/Qwen2.5-0.5B-Instruct",
        "agentrl train quickstart model.path=runs/latest",
        configs=shipped_configs(),
    )
)
def sft(
    words: Words = None,
    env: Annotated[str | None, typer.Option(help="The environment: NAME or NAME/SPLIT.")] = None,
    model: Annotated[str | None, typer.Option(help="The model: a folder, a name, a run, or scratch.")] = None,
    data: Annotated[str | None, typer.Option(help="Learn the conversations of this file, as JSON lines.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print config and arithmetic, and run nothing.")] = False,
) -> None:
    """Warm-start a model: it learns to do what the environment's expert does, or to say what a file says."""
    if follows_launcher():  # one of torchrun's processes, and not the one that runs the command
        follow_launcher()
        return
    shortcuts = [*shortcut("environment", env), *shortcut("model", model), *shortcut("sft.data", data)]
    config = read_config(words, shortcuts=shortcuts)
    asyncio.run(check_warm_start(config))
    if dry_run:
        print_dry_run(config, warm_start_rows(config))
        return
    run = start_run(config, kind="sft")
    with watching() as watcher, told_when_interrupted(lambda: stopped_words(run)):
        result = warm_start(run, watcher=watcher)
    note(f"done: {result.folder}\ntrain it: agentrl train … model.path={result.folder}")


def stopped_words(run: Run) -> str:
    """What an interrupted warm start leaves behind."""
    return f"stopped: {run.folder.path} has no model, for a warm start saves it at its end; begin again"
