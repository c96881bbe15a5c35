"""Shared parts of the commands of runs that only learn: `agentrl sft`, `agentrl dpo`, `agentrl reward-model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Protocol, TypeAlias

import typer

from agentrl.builders.pairs import first_run
from agentrl.builders.run import Run, RunResult, start_run
from agentrl.cli.arguments import config_words, shortcut
from agentrl.cli.exits import told_when_interrupted
from agentrl.config import Config, load_config
from agentrl.errors import UsageError
from agentrl.observe.console import note
from agentrl.observe.progress import RunWatcher
from agentrl.observe.terminal import watching

Sources: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option("--from", metavar="RUN", help="A run, its trajectories folder or a file of it; may be repeated."),
]


class LearnFunction(Protocol):
    """A function that learns as a run's config says."""

    def __call__(self, run: Run, *, watcher: RunWatcher | None = None) -> RunResult:
        """Learn, and return what came of it."""
        ...


def learn(
    config: Config,
    function: LearnFunction,
    *,
    kind: str,
    next_step: str,
    saved: str = "it is saved at the end",
) -> None:
    """Start a run's folder, let it learn, and print the next command.

    Args:
        config: The run; it has been checked.
        function: Learns.
        kind: As in `start_run`.
        next_step: Printed after the run; ``{folder}`` stands for its folder.
        saved: Why an interrupted run has no model.

    Raises:
        UsageError: something that the config names is not there, or the folder holds a run already.
        typer.Exit: the run was interrupted.
    """
    run = start_run(config, kind=kind)
    stopped = f"stopped: {run.folder.path} has no model, for {saved}; begin again"
    with watching() as watcher, told_when_interrupted(lambda: stopped):
        result = function(run, watcher=watcher)
    note(f"done: {result.folder}\n{next_step.format(folder=result.folder)}")


def pairs_config(words: list[str] | None, sources: list[Path], model: str | None) -> Config:
    """Read the config of a command that learns from pairs; without one, that of the first source's run.

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
