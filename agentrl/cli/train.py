"""`agentrl train`: reinforcement learning from a config or from options."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from agentrl.builders.checks import check_training
from agentrl.builders.workers import serve_launched_rank
from agentrl.cli.arguments import (
    EnvName,
    ModelName,
    Rewards,
    ShowConfig,
    Words,
    check_show_config,
    config_words,
    read_config,
)
from agentrl.cli.exits import ExitCode
from agentrl.cli.help_pages import examples
from agentrl.cli.reports import print_dry_run, updated_curve, write_run_report
from agentrl.cli.start_folder import in_start_folder
from agentrl.config import Config, shipped_configs
from agentrl.config.estimate import run_size
from agentrl.config.load import names_environment
from agentrl.config.overrides import PROMPTS, option_words, reward_words, task_words, warn_repeated
from agentrl.config.usual_learning_rate import rate_warnings
from agentrl.errors import AgentRLError, UsageError
from agentrl.observe.console import note, shown_path
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.terminal import watching
from agentrl.observe.trajectory_store import step_files
from agentrl.rollout.task_source import limited_by_tasks
from agentrl.runs.diagnosis import idle_steps
from agentrl.runs.dry_run import measured_step_s, training_rows
from agentrl.runs.rl import train as train_run
from agentrl.runs.start import Run, RunResult, resume_run, start_run
from agentrl.runs.stored_training import start_check
from agentrl.serving.launch.placement import check_machine

app = typer.Typer()

MAX_BYTES_AFTER_STOP = 1 << 25
"""Maximum number of bytes of episodes that the report of an interrupted run reads, which takes a few seconds."""


@app.command(
    epilog=examples(
        "agentrl train quickstart",
        "agentrl train quickstart trainer.steps=10 run.seed=1 --dry-run",
        "agentrl train tasks/math hardware/qwen2.5-7b_8gpu_vllm --dry-run --gpus 8",
        "agentrl train household/async agent.max_seconds=300 --dry-run --step-seconds 60",
        "agentrl train --env my_game:GuessNumber-v0 --model Qwen/Qwen2.5-0.5B-Instruct",
        "agentrl train quickstart --engine vllm",
        "agentrl train --tasks prompts.jsonl --reward my_rewards:exact --model Qwen/Qwen2.5-0.5B-Instruct",
        "agentrl train quickstart --episodes runs/latest trainer.steps=20",
        "agentrl train --resume runs/latest",
        "agentrl train --resume runs/latest trainer.steps=200",
        configs=shipped_configs(),
    )
)
def train(
    words: Words = None,
    env: EnvName = None,
    model: ModelName = None,
    engine: Annotated[str | None, typer.Option(help="Inference engine: local, vllm or sglang.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File of tasks; without an environment, of prompts, each answered once."),
    ] = None,
    reward: Rewards = None,
    episodes: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Train on the stored episodes of this run or folder, without an engine."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Resume this run; overrides are allowed.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the run, and print its size, estimates and placement.")
    ] = False,
    show_config: ShowConfig = False,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="With --dry-run: show the placement on this number of GPUs.")
    ] = None,
    step_seconds: Annotated[
        float | None,
        typer.Option(min=0.001, help="With --dry-run: expected seconds per step, to check rollout.max_staleness."),
    ] = None,
) -> None:
    """Train an agent with reinforcement learning.

    Ctrl-C saves a checkpoint, from which --resume continues exactly.

    With --episodes, batches consist of the complete groups of stored episodes, in the order of their starts, and are
    corrected as off-policy data with their stored log-probabilities. The episodes must come from a model with the same
    tokenizer; incomplete groups are left out.
    """
    if serve_launched_rank():
        return
    has_environment = env is not None or names_environment(config_words(words or []).source)
    shortcuts = [
        *option_words("environment", env),
        *option_words("model", model),
        *option_words("engine", engine),
        *task_words(tasks, has_environment=has_environment),
        *reward_words(reward),
        *option_words("trainer.episodes", None if episodes is None else episodes.resolve()),
    ]
    if not dry_run:
        _check_dry_run_options(gpus, step_seconds)
    check_show_config(show_config=show_config, dry_run=dry_run)
    if resume is not None:
        with in_start_folder(resume) as folder:
            run = _resume(folder, words, shortcuts)
            if dry_run:
                step_seconds = measured_step_s(run.folder) if step_seconds is None else step_seconds
                _print_dry_run(run.config, gpus=gpus, step_s=step_seconds, with_config=show_config)
            else:
                _finish(run)
        return
    config = read_config(words, shortcuts=shortcuts, reads="trainer")
    check_training(config)
    if dry_run:
        _print_dry_run(config, gpus=gpus, step_s=step_seconds, with_config=show_config)
        return
    check_machine(config)
    _finish(start_run(config, kind=config.algorithm.advantage, check=start_check(config)))


def _check_dry_run_options(gpus: int | None, step_seconds: float | None) -> None:
    if gpus is not None:
        raise UsageError("--gpus needs --dry-run", hint="CUDA_VISIBLE_DEVICES limits the GPUs of a real run")
    if step_seconds is not None:
        raise UsageError("--step-seconds needs --dry-run", hint="a run measures its steps itself")


def _print_dry_run(config: Config, *, gpus: int | None, step_s: float | None, with_config: bool) -> None:
    estimates = training_rows(config, gpus=gpus, step_s=step_s)
    print_dry_run(
        config, estimates, check=start_check(config), size=run_size(limited_by_tasks(config)), with_config=with_config
    )
    for warning in rate_warnings(config):
        note(f"warning: {warning}")


def print_run(result: RunResult, config: Config) -> None:
    """Print the last step of a run, steps without learning, and the next command."""
    where = f" --env {next(iter(config.environments))}" if config.environments else ""
    if config.environment is not None and config.environment.name == PROMPTS:
        where = " --prompts FILE"
    end = f"{'stopped' if result.interrupted else 'done'} after step {result.step}"
    note(f"{end}{idle_steps(result, config)}: {shown_path(result.folder)}")
    folder = shlex.quote(str(shown_path(result.folder)))
    if result.step and result.interrupted and _is_large(result.folder):
        note(f"report with: agentrl report {folder}")
    elif result.step:
        _report(result.folder)
    viewed = shlex.quote(config.trainer.episodes or str(shown_path(result.folder)))
    if result.interrupted:
        note(f"resume with: agentrl train --resume {folder}")
        raise typer.Exit(ExitCode.INTERRUPTED)
    note(f"measure it: agentrl eval --model {folder}{where}\nread it:    agentrl view {viewed}")


def _is_large(folder: Path) -> bool:
    """Return True if a report would read episodes for more than a few seconds."""
    return sum(path.stat().st_size for path in step_files(RunDirectory(folder).trajectories)) > MAX_BYTES_AFTER_STOP


def _report(folder: Path) -> None:
    try:
        note(f"report:     {write_run_report(folder).html}")
    except (AgentRLError, OSError) as error:  # the run itself succeeded
        note(f"cannot write the report: {error}")


def _resume(folder: Path, words: list[str] | None, shortcuts: list[str]) -> Run:
    given = config_words(words or [])
    if given.source is not None or shortcuts:
        raise UsageError(
            "a run is resumed with its own config",
            got=given.source or " ".join(shortcuts),
            expected="--resume RUN_DIR, and only key=value overrides",
        )
    warn_repeated(given.overrides)
    return resume_run(folder, given.overrides)


def _finish(run: Run) -> None:
    note(run_size(limited_by_tasks(run.config)))
    try:
        with updated_curve(run.folder.path), watching() as watcher:
            result = train_run(run, watcher=watcher)
    except KeyboardInterrupt:
        folder = shlex.quote(str(shown_path(run.folder.path)))
        if run.folder.config_file.is_file():
            note(f"stopped immediately; resume from the newest checkpoint with: agentrl train --resume {folder}")
        else:
            note("stopped immediately, before the first checkpoint")
        raise
    print_run(result, run.config)
