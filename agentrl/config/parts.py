"""A run of several environments as several configs of one: everything else in them is the same."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from agentrl.agent_loop import AgentLoop
from agentrl.config.episodes import AgentChanges, AgentConfig, EnvironmentConfig, MixedEnvironmentConfig
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.registry import Kind, lookup

SOLE = ""
"""The label of a run's only environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One environment of a run."""

    label: str
    """As the user calls it; `SOLE` for the only one."""
    weight: float
    """Its part of the groups, beside the weights of the others."""
    config: Config
    """The run's config with this environment alone, and the agent as it is there."""


def parts_of(config: Config) -> tuple[Part, ...]:
    """The environments of a run, in the order of its config; one, with the config itself, where there is one."""
    if not config.environments:
        return (Part(label=SOLE, weight=1.0, config=config),)
    return tuple(
        Part(label=label, weight=entry.weight, config=_alone(config, entry))
        for label, entry in config.environments.items()
    )


def _alone(config: Config, entry: MixedEnvironmentConfig) -> Config:
    environment = EnvironmentConfig(**{name: getattr(entry, name) for name in EnvironmentConfig.model_fields})
    evaluation = config.evaluation
    if entry.evaluation_split is not None:
        evaluation = evaluation.model_copy(update={"split": entry.evaluation_split})
    return config.model_copy(
        update={
            "environment": environment,
            "environments": {},
            "agent": _changed(config.agent, entry.agent),
            "evaluation": evaluation,
        }
    )


def _changed(agent: AgentConfig, changes: AgentChanges) -> AgentConfig:
    given = {name: value for name, value in changes if value is not None}
    fresh: dict[str, Any] = {"options": {}, "tools": []} if given.get("loop", agent.loop) != agent.loop else {}
    return agent.model_copy(update={**fresh, **given})


def agent_loop_class(name: str) -> type[AgentLoop]:
    """Look up the class of an agent loop.

    Raises:
        UnknownNameError: no such loop.
        ConfigError: the object is not an agent loop.
    """
    kind = lookup(Kind.AGENT_LOOP, name)
    if not (inspect.isclass(kind) and issubclass(kind, AgentLoop)):
        raise ConfigError(f"{name} is not an agent loop", got=repr(kind), expected="a subclass of agentrl.AgentLoop")
    return kind
