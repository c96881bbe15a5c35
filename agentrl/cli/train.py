"""`agentrl train`: reinforcement learning from a config or from options."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from agentrl.builders.checks import check_training
from agentrl.builders.workers import serve_launched_rank
from agentrl.cli.arguments import EnvName, ModelName, Rewards, Words, config_words, read_config, shortcut
from agentrl.cli.exits import ExitCode
from agentrl.cli.help import examples
from agentrl.cli.reports import updated_curve, write_run_report
from agentrl.config import Config, dump_config, shipped_configs
from agentrl.config.config import SCRATCH
from agentrl.config.derived import EnvironmentConfigs, per_environment_configs
from agentrl.config.estimate import EstimateRow, rows, run_size
from agentrl.config.learning_rate import rate_rows, rate_warnings
from agentrl.config.load import names_environment
from agentrl.config.overrides import PROMPTS, reward_words, task_words
from agentrl.env_lookup import resolve_environment
from agentrl.errors import AgentRLError, UsageError
from agentrl.observe.console import note, out
from agentrl.observe.learning import steps_without_learning
from agentrl.observe.metrics import check_trackers, read_metrics
from agentrl.observe.model_folder import find_model
from agentrl.observe.run_folder import RunDirectory
from agentrl.observe.terminal import watching
from agentrl.rollout.environment_probe import check_environments
from agentrl.rollout.judges.scorers import judge_rows
from agentrl.rollout.loop_choice import select_default_loop
from agentrl.rollout.task_source import task_source
from agentrl.runs.rl import train as train_run
from agentrl.runs.start import Run, RunResult, StartCheck, check_rollouts, check_tasks, resume_run, start_run
from agentrl.serving.launch import usable_gpus
from agentrl.serving.launch.placement import check_machine, gpu_rows
from agentrl.training.objective import learns_from_rewards

app = typer.Typer()


@app.command(
    epilog=examples(
        "agentrl train quickstart",
        "agentrl train quickstart trainer.steps=10 run.seed=1 --dry-run",
        "agentrl train tasks/math hardware/qwen2.5-7b_8gpu_vllm --dry-run --gpus 8",
        "agentrl train --env my_game:GuessNumber-v0 --model Qwen/Qwen2.5-0.5B-Instruct",
        "agentrl train quickstart --engine vllm",
        "agentrl train --tasks prompts.jsonl --reward my_rewards:exact --model Qwen/Qwen2.5-0.5B-Instruct",
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
        typer.Option(metavar="FILE", help="Tasks of the environment; without an environment, prompts to answer once."),
    ] = None,
    reward: Rewards = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Resume this run; overrides are allowed.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the config, estimates and the placement.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="With --dry-run: show the placement on this number of GPUs.")
    ] = None,
) -> None:
    """Train an agent by reinforcement learning.

    Ctrl-C saves a checkpoint, from which --resume continues exactly.
    """
    if serve_launched_rank():
        return
    has_environment = env is not None or names_environment(config_words(words or []).source)
    shortcuts = [
        *shortcut("environment", env),
        *shortcut("model", model),
        *shortcut("engine", engine),
        *task_words(tasks, has_environment=has_environment),
        *reward_words(reward),
    ]
    if resume is not None:
        _finish(_resume(resume, words, shortcuts))
        return
    config = read_config(words, shortcuts=shortcuts)
    check_training(config)
    if dry_run:
        on_gpus = gpu_rows(config, len(usable_gpus(os.environ)) if gpus is None else gpus)
        amounts = [*rows(config), *rate_rows(config), *judge_rows(config), *on_gpus]
        print_dry_run(config, amounts, check=check_rollouts)
        for warning in rate_warnings(config):
            note(f"warning: {warning}")
        return
    if gpus is not None:
        raise UsageError("--gpus needs --dry-run", hint="CUDA_VISIBLE_DEVICES limits the GPUs of a real run")
    check_machine(config)
    _finish(start_run(config, kind=config.algorithm.advantage))


def print_dry_run(config: Config, amounts: Sequence[EstimateRow], *, check: StartCheck) -> None:
    """Print the resolved config and estimates, after the checks that the start of such a run makes."""
    check_trackers(config.trackers)
    if config.model.path != SCRATCH and Path(find_model(config.model.path)).is_dir():
        config = select_default_loop(config, say=note)
    tasks = []
    if config.has_environment:
        check_tasks(config)
        check_environments(config)
        tasks = [_tasks_row(part) for part in per_environment_configs(config)]
    check(config, fetch=False, say=note)
    out.print(dump_config(config))
    table = Table("quantity", "value", "from", box=None, pad_edge=False)
    for words in tasks:
        table.add_row(*words)
    for row in amounts:
        table.add_row(*row)
    out.print(table)


def _tasks_row(part: EnvironmentConfigs) -> tuple[str, str, str]:
    environment = part.config.sole_environment
    spec = resolve_environment(environment.name)
    name = f"tasks of {part.label}, weight {part.weight:g}" if part.label else "tasks"
    return name, f"{len(task_source(spec, environment)):,}", f"{spec.name}/{environment.split}"


def print_run(result: RunResult, config: Config) -> None:
    """Print the last step of a run, steps without learning, and the next command."""
    where = f" --env {next(iter(config.environments))}" if config.environments else ""
    if config.environment is not None and config.environment.name == PROMPTS:
        where = " --prompts FILE"
    end = f"{'stopped' if result.interrupted else 'done'} after step {result.step}"
    note(f"{end}{_without_learning(result, config)}: {result.folder}")
    if result.step:
        _report(result.folder)
    folder = shlex.quote(str(result.folder))
    if result.interrupted:
        note(f"resume with: agentrl train --resume {folder}")
        raise typer.Exit(ExitCode.INTERRUPTED)
    note(f"measure it: agentrl eval --model {folder}{where}\nread it:    agentrl view {folder}")


def _without_learning(result: RunResult, config: Config) -> str:
    """Describe the steps in which nothing was learned, if they are at least half of the run."""
    lines = read_metrics(RunDirectory(result.folder).metrics_file)
    idle = steps_without_learning(lines)
    if not learns_from_rewards(config.algorithm) or not idle or 2 * idle < len(lines):
        return ""
    return f", but nothing was learned in {idle} of {len(lines)} steps: all episodes of a task had the same return"


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
    return resume_run(folder, given.overrides)


def _finish(run: Run) -> None:
    note(run_size(run.config))
    try:
        with updated_curve(run.folder.path), watching() as watcher:
            result = train_run(run, watcher=watcher)
    except KeyboardInterrupt:
        folder = shlex.quote(str(run.folder.path))
        if run.folder.config_file.is_file():
            note(f"stopped immediately; resume from the newest checkpoint with: agentrl train --resume {folder}")
        else:
            note("stopped immediately, before the first checkpoint")
        raise
    print_run(result, run.config)
