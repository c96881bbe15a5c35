"""Whether a curriculum can do anything in its run, checked before the run's folder is made."""

from __future__ import annotations

from agentrl.assembly.environments import find_environment, task_source
from agentrl.config.curriculum import HorizonConfig, PooledBy, PoolsConfig
from agentrl.config.parts import Part, parts_of
from agentrl.config.schema import Config
from agentrl.errors import ConfigError


def check_curriculum(config: Config) -> None:
    """Check that a run reaches what its curriculum says.

    Raises:
        ConfigError: a horizon that no environment allows, stages or pools that would never change what is played.
    """
    if config.curriculum.horizon is not None:
        _check_horizon(config, config.curriculum.horizon, config.trainer.steps)
    if config.curriculum.pools is not None:
        _check_pools(config, config.curriculum.pools)


def _check_horizon(config: Config, horizon: HorizonConfig, steps: int) -> None:
    limits = {_name(part): _most_turns(part) for part in parts_of(config)}
    most = max(limits.values())
    if horizon.turns[-1] > most:
        raise ConfigError(
            "curriculum.horizon.turns goes beyond the longest episode",
            got=horizon.turns[-1],
            expected=f"at most {most} turns",
            hint="limits: "
            + ", ".join(f"{name} {turns}" for name, turns in limits.items())
            + "; the environment's own, or agent.max_turns where it is smaller",
        )

    last = max([*(horizon.at_steps or []), horizon.over_steps if horizon.success_above is not None else 0])
    if last >= steps:
        raise ConfigError(
            "curriculum.horizon grows after the end of the run",
            got=f"step {last}",
            expected=f"a step before trainer.steps, {steps}",
            hint="leave the last stage out, or train longer",
        )


def _most_turns(part: Part) -> int:
    environment = part.config.sole_environment
    own = find_environment(environment).turns_under(environment.options)
    return min(part.config.agent.max_turns, own or part.config.agent.max_turns)


def _check_pools(config: Config, pools: PoolsConfig) -> None:
    parts = parts_of(config)
    match pools.by:
        case PooledBy.ENVIRONMENT if len(parts) == 1:
            raise ConfigError(
                "curriculum.pools.by environment chooses among several",
                got="one environment",
                expected="environments, such as sizes of one puzzle",
                hint="set curriculum.pools.by to task or type",
            )
        case PooledBy.TYPE:
            for part in parts:
                _check_typed(part)
        case PooledBy.TASK:
            _check_walked_twice(config, parts)


def _check_typed(part: Part) -> None:
    environment = part.config.sole_environment
    if task_source(find_environment(environment), environment)[0].type is None:
        raise ConfigError(
            "curriculum.pools.by type needs tasks that say their type",
            got=f"tasks of {_name(part)} without one",
            expected="types",
            hint="set curriculum.pools.by to task or environment",
        )


def _check_walked_twice(config: Config, parts: tuple[Part, ...]) -> None:
    """A task is judged when its turn comes again: somewhere there must be fewer tasks than turns."""
    turns = config.trainer.steps * config.trainer.tasks_per_step
    weights = sum(part.weight for part in parts)
    sizes = {}
    for part in parts:
        environment = part.config.sole_environment
        sizes[_name(part)] = len(task_source(find_environment(environment), environment))
        if turns * part.weight / weights > sizes[_name(part)]:
            return
    raise ConfigError(
        "curriculum.pools.by task never meets a task again in this run",
        got=f"{turns:,} groups, and " + ", ".join(f"{size:,} tasks of {name}" for name, size in sizes.items()),
        expected="fewer tasks than groups",
        hint="judge types or environments (curriculum.pools.by), or take fewer tasks: a file (environment.tasks)",
    )


def _name(part: Part) -> str:
    return part.label or part.config.sole_environment.name
