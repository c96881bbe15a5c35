"""From a name to an environment: registry entries, and plain Gymnasium environments."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from typing import Any

import gymnasium

from agentrl.config.schema import EnvironmentConfig
from agentrl.env import AsyncEnv, EnvironmentSpec
from agentrl.errors import UsageError
from agentrl.registry import Kind, lookup, names
from agentrl.rollout.task_file import read_tasks
from agentrl.task import SeedTasks, TaskSource

_GYMNASIUM_ID = re.compile(r"^(?:(?P<module>[\w.]+):)?(?P<id>(?:[\w-]+/)?[\w.-]+-v\d+)$")


def find_environment(name: str) -> EnvironmentSpec:
    """The entry of an environment.

    Args:
        name: A registry name, a Gymnasium id (``module:EnvId`` imports the module first), or ``module:attr`` of an
            `EnvironmentSpec` or an environment's class.

    Raises:
        UnknownNameError: no such name; the message gives the nearest ones.
        UsageError: the module cannot be imported, or what it holds is no environment.
    """
    if name in names(Kind.ENVIRONMENT):
        return _as_spec(name, lookup(Kind.ENVIRONMENT, name))
    match = _GYMNASIUM_ID.match(name)
    if match:
        return _gymnasium_spec(name, match["module"], match["id"])
    return _as_spec(name, lookup(Kind.ENVIRONMENT, name))


def task_source(spec: EnvironmentSpec, config: EnvironmentConfig, *, split: str | None = None) -> TaskSource:
    """The tasks of a run.

    Args:
        spec: The environment.
        config: Options and file.
        split: Instead of the config's.

    Raises:
        UsageError: no such split, or a file that cannot be read.
    """
    if config.tasks is not None and split is None:
        return read_tasks(config.tasks, environment=spec.name)
    return spec.tasks(split or config.split, **{**spec.options, **config.options})


def _as_spec(name: str, found: Any) -> EnvironmentSpec:
    if isinstance(found, EnvironmentSpec):
        return found
    if inspect.isclass(found) and issubclass(found, gymnasium.Env | AsyncEnv):
        return _plain_spec(name, found)
    raise UsageError(
        f"{name} is not an environment",
        got=type(found).__name__,
        expected="an EnvironmentSpec, or a class derived from gymnasium.Env or agentrl.AsyncEnv",
    )


def _gymnasium_spec(name: str, module: str | None, identity: str) -> EnvironmentSpec:
    if module is not None:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"cannot import the module of environment {name}",
                got=f"no module {error.name}",
                hint="run from the folder that holds it, or install it",
            ) from error
    try:
        registered = gymnasium.spec(identity)
    except gymnasium.error.Error as error:
        raise UsageError(f"Gymnasium does not know the environment {identity}", got=str(error)) from error
    make = functools.partial(gymnasium.make, name, disable_env_checker=True)
    return _plain_spec(name, make, max_turns=registered.max_episode_steps, threshold=registered.reward_threshold)


def _plain_spec(
    name: str, make: Any, *, max_turns: int | None = None, threshold: float | None = None
) -> EnvironmentSpec:
    return EnvironmentSpec(
        name=name,
        make=make,
        tasks=functools.partial(_seed_tasks, name),
        splits=SeedTasks.SPLITS,
        description=(inspect.getdoc(make) or "") if inspect.isclass(make) else "",
        max_turns=max_turns,
        success_threshold=threshold,
    )


def _seed_tasks(environment: str, split: str, **options: Any) -> SeedTasks:
    """Tasks of an environment that has no task source; its options do not change them."""
    return SeedTasks(environment, split)
