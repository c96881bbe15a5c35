"""`agentrl rollout`: play episodes without a trainer."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.arguments import EnvName, ModelName, Rewards, Words, config_words, read_config
from agentrl.cli.exits import message_when_interrupted
from agentrl.cli.help_pages import examples
from agentrl.cli.start_folder import in_start_folder
from agentrl.config import shipped_configs
from agentrl.config.load import names_environment
from agentrl.config.overrides import option_words, reward_words, task_words, warn_repeated
from agentrl.errors import UsageError
from agentrl.observe.console import note, shown_path
from agentrl.observe.terminal import watching
from agentrl.runs.rollout import play, resume_rollout, start_rollout
from agentrl.runs.start import Run

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl rollout quickstart trainer.steps=10",
        "agentrl rollout quickstart --model runs/latest --engine vllm",
        "agentrl rollout --env my_game:GuessNumber-v0 --model Qwen/Qwen2.5-0.5B-Instruct algorithm.group_size=4",
        "agentrl rollout --resume runs/latest",
        "agentrl rollout --resume runs/latest trainer.steps=50",
        "agentrl train quickstart --episodes runs/latest trainer.steps=10",
        configs=shipped_configs(),
    )
)
def rollout(
    words: Words = None,
    env: EnvName = None,
    model: ModelName = None,
    engine: Annotated[str | None, typer.Option(help="Inference engine: local, vllm, sglang or openai.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File of tasks; without an environment, of prompts, each answered once."),
    ] = None,
    reward: Rewards = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Resume this run; overrides are allowed.")
    ] = None,
) -> None:
    """Play the episodes of a training run, without training: trainer.steps times trainer.tasks_per_step groups.

    Stores the episodes as a training run does: agentrl view shows them, agentrl rescore scores them again, and agentrl
    train --episodes, agentrl dpo and agentrl reward-model train on them. Ctrl-C keeps the finished episodes, and
    --resume plays the others.
    """
    if resume is not None:
        with in_start_folder(resume) as folder:
            _play(_resume(folder, words, [env, model, engine, tasks, *(reward or [])]))
        return
    has_environment = env is not None or names_environment(config_words(words or []).source)
    shortcuts = [
        *option_words("environment", env),
        *option_words("model", model),
        *option_words("engine", engine),
        *task_words(tasks, has_environment=has_environment),
        *reward_words(reward),
    ]
    _play(start_rollout(read_config(words, shortcuts=shortcuts)))


def _play(run: Run) -> None:
    folder = shlex.quote(str(shown_path(run.folder.path)))

    def stop_message() -> str:
        if not run.folder.config_file.is_file():
            return "stopped before the first episode had ended"
        return f"stopped; finished episodes are stored. Resume with: agentrl rollout --resume {folder}"

    with watching() as watcher, message_when_interrupted(stop_message):
        result = play(run, watcher=watcher)
    note(f"done: {result.groups} groups, {result.episodes} episodes in {folder}")
    note(f"read them:  agentrl view {folder}\ntrain on them: agentrl train CONFIG --episodes {folder}")


def _resume(folder: Path, words: list[str] | None, options: list[str | None]) -> Run:
    given = config_words(words or [])
    if given.source is not None or any(option is not None for option in options):
        raise UsageError(
            "a run is resumed with its own config",
            got=given.source or " ".join(filter(None, options)),
            expected="--resume RUN_DIR, and only key=value overrides",
        )
    warn_repeated(given.overrides)
    return resume_rollout(folder, given.overrides)
