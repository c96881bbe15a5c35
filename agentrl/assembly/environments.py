"""The environment and the tasks of a config."""

from __future__ import annotations

from agentrl.config.episodes import EnvironmentConfig
from agentrl.env import EnvironmentSpec
from agentrl.env_lookup import check_split, resolve_environment
from agentrl.errors import ConfigError
from agentrl.rollout.task_file import read_tasks
from agentrl.task import TaskSource


def find_environment(config: EnvironmentConfig) -> EnvironmentSpec:
    """The environment's entry.

    Raises:
        UnknownNameError: no such environment.
        UsageError: its module cannot be imported, or holds no environment.
    """
    return resolve_environment(config.name)


def task_source(spec: EnvironmentSpec, config: EnvironmentConfig, *, split: str | None = None) -> TaskSource:
    """The tasks of a split, or of the config's file.

    Args:
        spec: The environment.
        config: Options, split and file.
        split: Instead of the config's split or file.

    Raises:
        UsageError: no such split, options that the environment does not take, or a file that cannot be read.
    """
    if config.tasks is not None and split is None:
        return read_tasks(config.tasks, environment=spec.name)
    chosen = check_split(spec, split or config.split)
    try:
        return spec.tasks(chosen, **{**spec.options, **config.options})
    except TypeError as error:
        raise ConfigError(
            f"environment.options do not fit {spec.name}",
            got=", ".join(config.options) or "none",
            expected=f"among {', '.join(spec.options)}" if spec.options else "none",
            hint=str(error),
        ) from error
