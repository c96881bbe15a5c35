"""`agentrl reward-model`: a reward model from pairs of stored episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.builders.checks import check_reward_training
from agentrl.builders.run import Run, start_run
from agentrl.builders.workers import follow_launcher, follows_launcher
from agentrl.cli.dpo import pairs_config
from agentrl.cli.exits import told_when_interrupted
from agentrl.cli.help import examples
from agentrl.cli.train import Words
from agentrl.observe.console import note
from agentrl.observe.terminal import watching
from agentrl.runs.preferences import train_reward

app = typer.Typer()


@app.command(
    "reward-model",
    epilog=examples(
        "agentrl reward-model --from runs/latest",
        "agentrl reward-model --from runs/grpo --model Qwen/Qwen2.5-0.5B preferences.learning_rate=1e-5",
        "agentrl train quickstart agent.reward_model.path=runs/latest",
    ),
)
def reward_model(
    words: Words = None,
    sources: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="RUN", help="A run, its trajectories folder or a file of it; may be repeated."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The language model to start from.")] = None,
) -> None:
    """Train a reward model that gives the better of two episodes of a task the greater reward.

    Without a config it is that of the first run, and its model gets a new output.
    """
    if follows_launcher():  # one of torchrun's processes, and not the one that runs the command
        follow_launcher()
        return
    config = pairs_config(words, sources or [], model)
    check_reward_training(config)
    run = start_run(config, kind="reward-model")
    with watching() as watcher, told_when_interrupted(lambda: stopped_words(run)):
        result = train_reward(run, watcher=watcher)
    note(f"done: {result.folder}\nuse it: agentrl train … agent.reward_model.path={result.folder}")


def stopped_words(run: Run) -> str:
    """What an interrupted run leaves behind."""
    return f"stopped: {run.folder.path} has no model, for it is saved at the end; begin again"
