"""`agentrl sft`: a warm start on the expert's demonstrations."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from agentrl.builders.checks import check_warm_start
from agentrl.builders.workers import followed_launcher
from agentrl.cli.arguments import Words, read_config, shortcut
from agentrl.cli.help import examples
from agentrl.cli.learning import learn
from agentrl.cli.train import print_dry_run
from agentrl.config import shipped_configs
from agentrl.config.estimate import warm_start_rows
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
    if followed_launcher():
        return
    shortcuts = [*shortcut("environment", env), *shortcut("model", model), *shortcut("sft.data", data)]
    config = read_config(words, shortcuts=shortcuts)
    asyncio.run(check_warm_start(config))
    if dry_run:
        print_dry_run(config, warm_start_rows(config))
        return
    saved, use = "a warm start saves it at its end", "train it: agentrl train … model.path={folder}"
    learn(config, warm_start, kind="sft", next_step=use, saved=saved)
