"""`agentrl dpo`: learning from pairs of episodes that runs have stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.builders.checks import check_preferences
from agentrl.builders.pairs import check_sources, first_run
from agentrl.builders.run import Run, start_run
from agentrl.builders.workers import follow_launcher, follows_launcher
from agentrl.cli.arguments import config_words, shortcut
from agentrl.cli.exits import told_when_interrupted
from agentrl.cli.help import examples
from agentrl.cli.train import Words
from agentrl.config import Config, dump_config, load_config
from agentrl.config.algorithm import PreferencesConfig
from agentrl.errors import UsageError
from agentrl.observe.console import note, out
from agentrl.observe.terminal import watching
from agentrl.runs.preferences import learn_preferences

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl dpo --from runs/latest",
        "agentrl dpo --from runs/latest preferences.loss_options.beta=0.3 preferences.epochs=2",
        "agentrl dpo quickstart --model runs/sft --from runs/sft --from runs/grpo "
        "preferences.loss=spin preferences.pairs=demonstrations",
    )
)
def dpo(
    words: Words = None,
    sources: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="RUN", help="A run, its trajectories folder or a file of it; may be repeated."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model: a folder, a name, a run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the config, and run nothing.")] = False,
) -> None:
    """Learn from pairs of stored episodes of one task, the better against the worse; the model is its own reference.

    Without a config it is that of the first run, and its model is where the training starts.
    """
    if follows_launcher():  # one of torchrun's processes, and not the one that runs the command
        follow_launcher()
        return
    config = pairs_config(words, sources or [], model)
    check_preferences(config)
    check_sources(config.preferences or PreferencesConfig())
    if dry_run:
        out.print(dump_config(config), markup=False, highlight=False)
        return
    run = start_run(config, kind="dpo")
    with watching() as watcher, told_when_interrupted(lambda: stopped_words(run)):
        result = learn_preferences(run, watcher=watcher)
    note(f"done: {result.folder}\nmeasure it: agentrl eval --model {result.folder}")


def stopped_words(run: Run) -> str:
    """What an interrupted run leaves behind."""
    return f"stopped: {run.folder.path} has no model, for it is saved at the end; begin again"


def pairs_config(words: list[str] | None, sources: list[Path], model: str | None) -> Config:
    """The config of a command that learns from pairs; without one that of the first source's run.

    Raises:
        ConfigError: a wrong key or value.
        UsageError: neither a config is named nor a run.
    """
    told = config_words(words or [])
    if not words and not sources:
        raise UsageError("nothing says which episodes to learn from", expected="--from RUN, such as --from runs/latest")
    named = [f"preferences.sources={[str(source.resolve()) for source in sources]}"] if sources else []
    if told.source is not None or not sources:
        return load_config(told.source, [*shortcut("model", model), *named, *told.overrides])
    run = first_run(sources)
    fresh = ["run.name=null", "model.scratch=null", f"model.path={model or run.path}"]
    return load_config(run.config_file, [*fresh, *named, *told.overrides])
