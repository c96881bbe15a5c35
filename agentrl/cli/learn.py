"""Commands that train without rollouts: `agentrl sft`, `agentrl dpo`, `agentrl reward-model`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from agentrl.builders.workers import serve_launched_rank
from agentrl.cli.arguments import (
    EnvName,
    ModelName,
    ShowConfig,
    Words,
    check_show_config,
    config_words,
    read_config,
)
from agentrl.cli.exits import ExitCode, message_when_interrupted
from agentrl.cli.help_pages import examples
from agentrl.cli.reports import print_dry_run
from agentrl.cli.start_folder import in_start_folder
from agentrl.config import Config, dump_config, load_config, shipped_configs
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.estimate import warm_start_rows
from agentrl.config.overrides import option_words, warn_ignored, warn_repeated
from agentrl.errors import UsageError
from agentrl.observe.console import note, out, shown_path
from agentrl.observe.terminal import watching
from agentrl.runs.learning_commands import DPO, REWARD_MODEL, SFT, LearningCommand
from agentrl.runs.preferences import check_preferences_start
from agentrl.runs.sft import check_sft_start
from agentrl.runs.start import Run, resume_learning, start_run
from agentrl.training.stored_episodes import find_pairs, first_run, is_preference_file

app = typer.Typer()

Resume: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="RUN_DIR", help="Resume this run; overrides are allowed.")
]
Sources: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option("--from", metavar="RUN", help="Run, its trajectories folder, or a file in it; may be repeated."),
]


USES: Mapping[str, str] = {
    SFT.name: "train it: agentrl train … model.path={folder}",
    DPO.name: "measure it: agentrl eval --model {folder}",
    REWARD_MODEL.name: "use it: agentrl train … agent.reward_model.path={folder}",
}
"""Next command for the user by command, with ``{folder}`` for the run's folder."""


@app.command(
    "sft",
    epilog=examples(
        "agentrl sft quickstart",
        "agentrl sft quickstart sft.episodes=500 --dry-run",
        "agentrl sft --env household --model Qwen/Qwen2.5-0.5B-Instruct",
        "agentrl sft --data chats.jsonl --model Qwen/Qwen2.5-0.5B-Instruct",
        "agentrl sft --resume runs/latest",
        "agentrl train quickstart model.path=runs/latest",
        configs=shipped_configs(),
    ),
)
def sft(
    words: Words = None,
    env: EnvName = None,
    model: ModelName = None,
    data: Annotated[str | None, typer.Option(help="JSON Lines file of conversations to train on.")] = None,
    resume: Resume = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the warm start, and print its estimates.")
    ] = False,
    show_config: ShowConfig = False,
) -> None:
    """Warm-start a model on episodes of the environment's expert, or on the conversations of a file.

    Ctrl-C saves a checkpoint, from which --resume continues exactly.
    """
    if serve_launched_rank():
        return
    check_show_config(show_config=show_config, dry_run=dry_run)
    shortcuts = [*option_words("environment", env), *option_words("model", model), *option_words("sft.data", data)]
    if resume is not None:
        _resume(resume, words, shortcuts, SFT, dry_run=dry_run)
        return
    config = read_config(words, shortcuts=shortcuts, reads="sft")
    SFT.check(config)
    if dry_run:
        print_dry_run(config, warm_start_rows(config), check=check_sft_start, with_config=show_config)
        return
    _learn(start_run(config, kind=SFT.name, command=SFT.name, check=check_sft_start), SFT)


@app.command(
    "dpo",
    epilog=examples(
        "agentrl dpo --from runs/latest",
        "agentrl dpo --from pairs.jsonl --model Qwen/Qwen2.5-0.5B-Instruct",
        "agentrl dpo --from runs/latest preferences.loss_options.beta=0.3 preferences.epochs=2",
        "agentrl dpo --resume runs/latest",
        "agentrl dpo quickstart --model runs/sft --from runs/sft --from runs/grpo "
        "preferences.loss=spin preferences.pairs=demonstrations",
    ),
)
def dpo(
    words: Words = None,
    sources: Sources = None,
    model: Annotated[str | None, typer.Option(help="Initial model: a folder, a name, or a run.")] = None,
    resume: Resume = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the config.")] = False,
) -> None:
    """Train on pairs of stored episodes of one task, a better and a worse one; the initial model is the reference.

    Without a config, the config and the model of the first run are used; a file of pairs needs only --model. Ctrl-C
    saves a checkpoint, from which --resume continues exactly.
    """
    if serve_launched_rank():
        return
    if resume is not None:
        _resume(resume, words, [*option_words("model", model), *map(str, sources or [])], DPO, dry_run=dry_run)
        return
    config = _pairs_config(words, sources or [], model)
    DPO.check(config)
    if dry_run:
        check_preferences_start(config)
        out.print(dump_config(config))
        return
    _learn(start_run(config, kind=DPO.name, command=DPO.name, check=check_preferences_start), DPO)


@app.command(
    "reward-model",
    epilog=examples(
        "agentrl reward-model --from runs/latest",
        "agentrl reward-model --from runs/grpo --model Qwen/Qwen2.5-0.5B preferences.learning_rate=1e-5",
        "agentrl reward-model --resume runs/latest",
        "agentrl train quickstart agent.reward_model.path=runs/latest",
    ),
)
def reward_model(
    words: Words = None,
    sources: Sources = None,
    model: Annotated[str | None, typer.Option(help="Initial language model.")] = None,
    resume: Resume = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the config.")] = False,
) -> None:
    """Train a reward model that gives the better of two episodes of a task the higher reward.

    Without a config, the config of the first run is used, and its model gets a new output for the reward. Ctrl-C saves
    a checkpoint, from which --resume continues exactly.
    """
    if serve_launched_rank():
        return
    if resume is not None:
        options = [*option_words("model", model), *map(str, sources or [])]
        _resume(resume, words, options, REWARD_MODEL, dry_run=dry_run)
        return
    config = _pairs_config(words, sources or [], model)
    REWARD_MODEL.check(config)
    if dry_run:
        find_pairs(config.preferences or PreferencesConfig())
        out.print(dump_config(config))
        return
    _learn(start_run(config, kind=REWARD_MODEL.name, command=REWARD_MODEL.name, check=None), REWARD_MODEL)


def _resume(
    run: Path, words: list[str] | None, options: list[str], command: LearningCommand, *, dry_run: bool = False
) -> None:
    """Resume a run of a command."""
    given = config_words(words or [])
    if given.source is not None or options or dry_run:
        raise UsageError(
            "a run is resumed with its own config",
            got=given.source or " ".join(options) or "--dry-run",
            expected="--resume RUN_DIR, and only key=value overrides",
        )
    warn_repeated(given.overrides)
    warn_ignored(given.overrides, reads=command.section)
    with in_start_folder(run) as folder:
        found = resume_learning(folder, given.overrides, command=command.name)
        command.check(found.config)
        _learn(found, command)


def _learn(run: Run, command: LearningCommand) -> None:
    """Train, and print the next command."""

    def folder() -> str:
        return shlex.quote(str(shown_path(run.folder.path)))

    def resume_message() -> str:
        return f"resume with: agentrl {command.name} --resume {folder()}"

    def stop_message() -> str:
        if not run.folder.config_file.is_file():
            return "stopped before the first update: start again"
        return f"stopped immediately; {resume_message()}"

    with watching() as watcher, message_when_interrupted(stop_message):
        result = command.run(run, watcher=watcher)
    use = USES[command.name].format(folder=folder())
    if result.interrupted:
        note(f"stopped after update {result.step}; {resume_message()}\n{use}")
        raise typer.Exit(ExitCode.INTERRUPTED)
    note(f"done: {folder()}\n{use}")


def _pairs_config(words: list[str] | None, sources: list[Path], model: str | None) -> Config:
    """Read the config of a command that trains on pairs; by default, that of the first source's run."""
    given = config_words(words or [])
    warn_repeated([*option_words("model", model), *given.overrides])
    warn_ignored(given.overrides, reads="preferences")
    if not words and not sources:
        raise UsageError("no episodes to train on", expected="--from RUN, such as --from runs/latest")
    named = [f"preferences.sources={[str(source.resolve()) for source in sources]}"] if sources else []
    needs_no_run = model is not None and sources and is_preference_file(sources[0])
    if given.source is not None or not sources or needs_no_run:
        return load_config(given.source, [*option_words("model", model), *named, *given.overrides])
    run = first_run(sources)
    fresh = ["run.name=null", "model.scratch=null", f"model.path={model or run.path}"]
    return load_config(run.config_file, [*fresh, *named, *given.overrides])
