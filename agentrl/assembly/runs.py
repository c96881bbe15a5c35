"""Starting a run's folder, and finding one to go on with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agentrl.assembly.chat_file import ENVIRONMENT
from agentrl.assembly.checks import check_training
from agentrl.assembly.curriculum_check import check_curriculum
from agentrl.assembly.environments import find_environment, task_source
from agentrl.assembly.episodes import build_host, build_loop
from agentrl.assembly.judges import check_rewards
from agentrl.assembly.machine import check_machine
from agentrl.assembly.models import SCRATCH, load_tokenizer, resolve_model
from agentrl.assembly.resume_rules import Change, changes, check_same_run
from agentrl.assembly.tools import check_tools
from agentrl.config.loading import dump_config, load_config
from agentrl.config.parts import parts_of
from agentrl.config.schema import Config
from agentrl.env import Isolation
from agentrl.errors import AgentRLError, ConfigError, UsageError
from agentrl.observe.checkpoints import Checkpoints
from agentrl.observe.run_directory import RunDirectory
from agentrl.observe.trackers import check_trackers

MIXED = "mixed"
"""Stands for the environment in the made-up name of a run that has several."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder and its config."""

    folder: RunDirectory
    config: Config
    changes: tuple[Change, ...] = ()
    """What is different from the config in the folder, which takes it over once the run has begun."""


def start_run(config: Config, *, kind: str) -> Run:
    """Make the folder of a new run and save the resolved config in it.

    Args:
        config: The run; its environment, its tasks, those of its evaluations, and its model must be there.
        kind: What the run does, for its made-up name: ``grpo``, ``sft``.

    Raises:
        UsageError: something that the config names is not there, or the folder holds a run already.
        ConfigError: options that the agent loop or a tool does not take, or evaluations of more tasks than their split
            holds.
    """
    name = _checked_world(config) if config.has_environment else ENVIRONMENT
    check_trackers(config.trackers)
    resolved = resolve_model(config)
    if resolved.model.path != SCRATCH:
        load_tokenizer(resolved.model.path)
    if config.has_environment:
        check_environments(config)
    folder = RunDirectory.create(Path(config.run.directory), config.run.name, prefix=f"{name}-{kind}")
    try:
        folder.save_config(dump_config(resolved))
    except UsageError:
        folder.undo_start()
        raise
    return Run(folder, resolved)


def _checked_world(config: Config) -> str:
    """Check what is played, and evaluated; what to call it."""
    for part in parts_of(config):
        spec = find_environment(part.config.sole_environment)
        task_source(spec, part.config.sole_environment)
        build_loop(part.config.agent)
    check_tools(config)
    check_rewards(config)
    _check_panels(config)
    check_curriculum(config)
    return MIXED if config.environments else spec.name


def check_environments(config: Config) -> None:
    """Make each environment once and close it, so that one that cannot be made is found before the run begins.

    Environments that live in processes of their own are not tried: a process takes seconds to start, and their first
    episode tells the same.

    Raises:
        UsageError: an environment cannot be made.
    """
    with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop already
        thread.submit(asyncio.run, _make_environments(config)).result()


async def _make_environments(config: Config) -> None:
    for part in parts_of(config):
        spec, environment = find_environment(part.config.sole_environment), part.config.sole_environment
        if (environment.isolation or spec.isolation_under(environment.options)) is Isolation.PROCESS:
            continue
        host = build_host(part.config, spec=spec)
        try:
            async with host.borrow("the check before the run"):
                pass
        except AgentRLError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"environment {spec.name} cannot be made",
                got=error.got,
                expected="a constructor that takes environment.options",
                hint=f"try: agentrl env check {spec.name}",
            ) from error
        finally:
            await host.close()


def _check_panels(config: Config) -> None:
    if config.evaluation.every:
        for part in parts_of(config):
            _check_panel(part.config)


def _check_panel(config: Config) -> None:
    spec = find_environment(config.sole_environment)
    split, asked = config.evaluation.split, config.evaluation.tasks
    held = len(task_source(spec, config.sole_environment, split=split))
    if asked > held:
        raise ConfigError(
            "evaluation.tasks exceeds the split of evaluations",
            got=f"{asked:,} tasks of {spec.name}/{split}",
            expected=f"at most {held:,}",
            hint=f"set evaluation.tasks={held} and more evaluation.samples, or another evaluation.split",
        )


def resume_run(path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """An existing run, to go on with. Its folder is left as it is until the run has begun.

    Args:
        path: Its folder, or ``runs/latest``.
        overrides: Changes of the config, such as ``trainer.steps=200``.

    Raises:
        UsageError: no run lies there.
        ConfigError: a wrong override, one that would make it another run, or changes of a run that has no step left.
    """
    folder = RunDirectory.open(path)
    config = load_config(folder.config_file, overrides)
    found = changes(load_config(folder.config_file), config)
    check_same_run(found)
    _check_steps_left(folder, config, found)
    check_training(config)
    check_machine(config)
    check_trackers(config.trackers)
    _check_panels(config)
    check_curriculum(config)
    return Run(folder, config, found)


def _check_steps_left(folder: RunDirectory, config: Config, found: Sequence[Change]) -> None:
    """Refuse changes that no step would ever see."""
    newest = Checkpoints(folder.checkpoints, keep=1).newest() if found else None
    if newest is not None and newest.step >= config.trainer.steps:
        raise ConfigError(
            "the run has no step left that the change could act on",
            got=f"{', '.join(map(str, found))}; {newest.step} steps are done",
            expected=f"trainer.steps above {newest.step}",
            hint=f"add trainer.steps={2 * newest.step}",
        )
