"""Starting a run's folder, and finding one to go on with."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.assembly.chat_file import ENVIRONMENT
from agentrl.assembly.checks import check_training
from agentrl.assembly.curriculum_check import check_curriculum
from agentrl.assembly.environments import find_environment, task_source
from agentrl.assembly.episodes import build_host, build_loop
from agentrl.assembly.machine import check_machine
from agentrl.assembly.models import SCRATCH, load_tokenizer, resolve_model
from agentrl.assembly.tools import check_tools
from agentrl.config.loading import dump_config, load_config
from agentrl.config.parts import parts_of
from agentrl.config.schema import Config
from agentrl.env import Isolation
from agentrl.errors import AgentRLError, ConfigError, UsageError
from agentrl.observe.run_directory import RunDirectory
from agentrl.observe.trackers import check_trackers

MIXED = "mixed"
"""Stands for the environment in the made-up name of a run that has several."""
_FREE_ON_RESUME = (
    *("trainer", "rollout", "evaluation", "checkpoint", "trackers", "cluster", "model.device"),
    *("engine.slots", "engine.lanes", "engine.cache_tokens", "engine.prefill_tokens", "engine.timeout_s"),
    *("engine.servers", "engine.replicas", "engine.python", "engine.arguments", "engine.tensor_parallel"),
    *("engine.gpus", "engine.max_running", "engine.api_key_variable", "engine.start_timeout_s"),
    *("engine.health_timeout_s", "engine.transport", "engine.bucket_mib", "engine.sleep"),
    *("environment.workers", "environment.max_concurrent", "environment.reset_timeout_s"),
    *("environment.step_timeout_s", "agent.tool_timeout_s"),
)
"""Keys and sections that a resumed run may change: how long, how fast, how watched; the others say what the run is."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder and its config."""

    folder: RunDirectory
    config: Config


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


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _is_free(key: str) -> bool:
    """Whether a resumed run may change it; what is free of one environment is free of each of several."""
    section, _, rest = key.partition(".")
    plain = f"environment.{rest.partition('.')[2]}" if section == "environments" else key
    return any(f"{plain}.".startswith(f"{free}.") for free in _FREE_ON_RESUME)


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
    """An existing run, to go on with.

    Args:
        path: Its folder, or ``runs/latest``.
        overrides: Changes of the config, such as ``trainer.steps=200``.

    Raises:
        UsageError: no run lies there.
        ConfigError: a wrong override, or one that would make it another run.
    """
    folder = RunDirectory.open(path)
    config = load_config(folder.config_file, overrides)
    _check_same_run(load_config(folder.config_file), config)
    check_training(config)
    check_machine(config)
    check_trackers(config.trackers)
    _check_panels(config)
    check_curriculum(config)
    folder.save_config(dump_config(config))
    return Run(folder, config)


def _check_same_run(saved: Config, config: Config) -> None:
    """A resumed run may become longer, faster or better watched; it does not become another one."""
    before, after = _flat(saved.model_dump()), _flat(config.model_dump())
    changed = sorted(key for key in before | after if before.get(key) != after.get(key))
    refused = [key for key in changed if not _is_free(key)]
    if refused:
        raise ConfigError(
            "a resumed run keeps what it is",
            got=f"a change of {', '.join(refused)}",
            expected=f"changes in {', '.join(_FREE_ON_RESUME)} only",
            hint="start a new run from this one's model: agentrl train CONFIG model.path=RUN",
        )
