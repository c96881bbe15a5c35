"""`agentrl dpo`: learning from pairs of episodes that runs have stored."""

from __future__ import annotations

from typing import Annotated

import typer

from agentrl.builders.checks import check_preferences
from agentrl.builders.pairs import check_sources
from agentrl.builders.workers import followed_launcher
from agentrl.cli.arguments import Words
from agentrl.cli.help import examples
from agentrl.cli.learning import Sources, learn, pairs_config
from agentrl.config import dump_config
from agentrl.config.algorithm import PreferencesConfig
from agentrl.observe.console import out
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
    sources: Sources = None,
    model: Annotated[str | None, typer.Option(help="The model: a folder, a name, a run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the config, and run nothing.")] = False,
) -> None:
    """Learn from pairs of stored episodes of one task, the better against the worse; the model is its own reference.

    Without a config it is that of the first run, and its model is where the training starts.
    """
    if followed_launcher():
        return
    config = pairs_config(words, sources or [], model)
    check_preferences(config)
    check_sources(config.preferences or PreferencesConfig())
    if dry_run:
        out.print(dump_config(config), markup=False, highlight=False)
        return
    learn(config, learn_preferences, kind="dpo", next_step="measure it: agentrl eval --model {folder}")
