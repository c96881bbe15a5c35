"""Configs of single environments and adapters, and resource bundles for a cluster, derived from a run's config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from agentrl.agent_loop import AgentLoop
from agentrl.config.cluster import ClusterConfig
from agentrl.config.config import AlgorithmConfig, Config, TrainerConfig
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.config.environment import (
    AgentChanges,
    AgentConfig,
    EnvironmentConfig,
    MixedEnvironmentConfig,
)
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError, UnknownNameError, did_you_mean
from agentrl.registry import Kind, lookup

SOLE = ""
"""Label of a run's only environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfigs:
    """One environment of a run, with its config."""

    label: str
    """Label in the config; `SOLE` for the only environment."""
    weight: float
    """Share of the groups, relative to the weights of the other environments."""
    config: Config
    """The run's config with only this environment, and with the environment's changes of ``agent``."""


def per_environment_configs(config: Config) -> tuple[EnvironmentConfigs, ...]:
    """Return the environments of a run in the order of its config; for a single environment, the config itself."""
    if not config.environments:
        return (EnvironmentConfigs(label=SOLE, weight=1.0, config=config),)
    return tuple(
        EnvironmentConfigs(label=label, weight=entry.weight, config=_single_environment(config, label, entry))
        for label, entry in config.environments.items()
    )


def _single_environment(config: Config, label: str, entry: MixedEnvironmentConfig) -> Config:
    environment = EnvironmentConfig(**{name: getattr(entry, name) for name in EnvironmentConfig.model_fields})
    evaluation = config.evaluation
    if entry.evaluation_split is not None:
        evaluation = evaluation.model_copy(update={"split": entry.evaluation_split})
    return config.model_copy(
        update={
            "environment": environment,
            "environments": {},
            "agent": _apply_changes(config.agent, entry.agent),
            "evaluation": evaluation,
            "algorithm": _changed_algorithm(config.algorithm, entry.algorithm, f"environments.{label}", "environment"),
        }
    )


def _apply_changes(agent: AgentConfig, changes: AgentChanges) -> AgentConfig:
    values = {name: value for name, value in changes if value is not None}
    has_new_loop = values.get("loop", agent.loop) != agent.loop
    fresh: dict[str, Any] = {"options": {}, "tools": [], "roles": None} if has_new_loop else {}
    return agent.model_copy(update={**fresh, **values})


OF_GROUPS = ("group_size", "dynamic_sampling", "expert", "role_weights", "teacher")
"""Keys of ``algorithm`` that determine how groups are played or weighted; they are the same for the whole run."""


def environment_algorithms(config: Config) -> dict[str, AlgorithmConfig]:
    """Return the algorithm of each environment by label; empty if all environments use the run's algorithm.

    Raises:
        ConfigError: keys that an environment's algorithm does not have, or values that do not fit.
    """
    if not any(entry.algorithm for entry in config.environments.values()):
        return {}
    return {
        label: _changed_algorithm(config.algorithm, entry.algorithm, f"environments.{label}", "environment")
        for label, entry in config.environments.items()
    }


def adapter_config(config: Config, name: str) -> Config:
    """Return a run's config with the optimizer and algorithm settings of one adapter.

    If the adapter has another estimator or loss, the run's options of estimator or loss are dropped.

    Raises:
        ConfigError: keys that an adapter does not have, or values that do not fit.
    """
    section = config.named_adapters[name]
    algorithm = _changed_algorithm(config.algorithm, section.algorithm, f"adapters.{name}", "adapter")
    try:
        trainer = TrainerConfig.model_validate({**config.trainer.model_dump(), **section.trainer_changes})
    except ValidationError as error:
        raise ConfigError(f"adapters.{name} is invalid", got=error.errors()[0]["msg"]) from error
    return config.model_copy(update={"algorithm": algorithm, "trainer": trainer})


def _changed_algorithm(run: AlgorithmConfig, changes: Mapping[str, Any], where: str, part: str) -> AlgorithmConfig:
    """Return a run's algorithm with the changes of a part; another estimator or loss drops the run's options of it.

    Raises:
        ConfigError: a key is unknown or common to all parts, or a value does not fit.
    """
    for key in changes:
        if key in OF_GROUPS or key not in AlgorithmConfig.model_fields:
            known = [field for field in AlgorithmConfig.model_fields if field not in OF_GROUPS]
            raise ConfigError(
                f"{where}.algorithm.{key} is not a setting of an {part}",
                got=key,
                expected=", ".join(known),
                hint=f"set algorithm.{key} for all {part}s" if key in OF_GROUPS else did_you_mean(key, known),
            )
    if not changes:
        return run
    base = run.model_dump(exclude_unset=True)
    for key, own in (("advantage", ("advantage_options",)), ("loss", ("loss_options", "aggregation", "norm_length"))):
        if changes.get(key, base.get(key)) != base.get(key):
            base = {field: value for field, value in base.items() if field not in own}
    try:
        return AlgorithmConfig.model_validate({**base, **changes})
    except ValidationError as error:
        raise ConfigError(f"{where} is invalid", got=error.errors()[0]["msg"]) from error


def agent_loop_class(name: str) -> type[AgentLoop]:
    """Look up the class of an agent loop.

    Raises:
        UnknownNameError: no such loop.
        ConfigError: the object is not an agent loop.
    """
    kind = lookup(Kind.AGENT_LOOP, name)
    if not (inspect.isclass(kind) and issubclass(kind, AgentLoop)):
        raise ConfigError(f"{name} is not an agent loop", got=repr(kind), expected="a subclass of agentrl.AgentLoop")
    if inspect.isabstract(kind):
        expected = "async def run(self, episode)"
        raise ConfigError(f"agent loop {name} has no run()", got=f"{kind.__name__} without it", expected=expected)
    return kind


def make_agent_loop(name: str, options: Mapping[str, Any]) -> AgentLoop:
    """Make the agent loop of the config's ``agent.loop`` and ``agent.options``.

    Raises:
        UnknownNameError: the loop does not exist.
        ConfigError: an option is unknown, or the loop refuses a value.
    """
    kind = agent_loop_class(name)
    known = list(inspect.signature(kind).parameters)
    for option in options:
        if option not in known:
            raise ConfigError(
                f"agent loop {name} has no option {option!r} (agent.options.{option})",
                expected=", ".join(known) or "no options",
                hint=did_you_mean(option, known) or "set agent.options={} to remove the options of another loop",
            )
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"agent loop {name} cannot be created from agent.options", got=error, expected=", ".join(known)
        ) from error
    loop: AgentLoop = kind(**options)
    return loop


def turns_are_steps(loop: AgentLoop, agent: AgentConfig) -> bool:
    """Return True if an environment's step limit also bounds the turns: one agent plays, with a turn per step."""
    return loop.turns_are_steps and not loop.roles and not agent.called_roles


def most_turns(part: EnvironmentConfigs) -> int:
    """Return the maximum number of turns of an episode, limited by the agent and the environment.

    Without such an environment, as in plans of a trainer alone, only the agent limits them.

    Raises:
        UnknownNameError: no such agent loop.
        ConfigError: an option of the loop is invalid.
    """
    agent, environment = part.config.agent, part.config.sole_environment
    try:
        own = resolve_environment(environment.name).turns_under(environment.options)
    except UnknownNameError:
        return agent.max_turns
    if own is None or own >= agent.max_turns:
        return agent.max_turns
    return own if turns_are_steps(make_agent_loop(agent.loop, agent.options), agent) else agent.max_turns


HEAD = "rank 0"
"""Name of the rank that is this process."""
ENVIRONMENTS = "environments-"
"""Prefix of the names of actors that run environments."""


@dataclass(frozen=True, slots=True)
class ResourceBundle:
    """Resources of one node, for one rank or one engine."""

    name: str
    """Name in messages: ``rank 1``, ``server-0``."""
    resources: Mapping[str, float]

    @property
    def in_words(self) -> str:
        """Text of the resources: ``CPU 2, GPU 1``."""
        return ", ".join(f"{name} {amount:g}" for name, amount in self.resources.items()) or "nothing"


def rank_bundles(config: Config, section: ClusterConfig, *, gpus: bool) -> list[ResourceBundle]:
    """Return the bundle of each rank.

    Args:
        config: The run's config.
        section: The config's cluster section.
        gpus: True if the cluster has GPUs.
    """
    on_gpus = gpus and config.model.device != "cpu"
    resources = section.rank if section.rank is not None else _default(1 if on_gpus else 0)
    return [ResourceBundle(f"rank {rank}", resources) for rank in range(config.trainer.processes)]


def evaluation_engine_config(config: Config) -> Config | None:
    """Return the config with ``evaluation.engine`` as its engine; ``None`` if evaluations use the run's engine."""
    own = config.evaluation.engine
    return None if own is None else config.model_copy(update={"engine": own, "cluster": None})


def engine_bundles(config: Config, section: ClusterConfig, *, gpus: bool) -> list[ResourceBundle]:
    """Return the bundle of each engine that the run starts; none for servers that already run."""
    engine = config.engine
    count, each = 0, 0
    if isinstance(engine, LocalEngineConfig):
        count, each = section.engines, 0 if config.model.device == "cpu" else 1
    elif isinstance(engine, ServerEngineConfig) and engine.servers == "launch":
        count, each = engine.replicas, engine.tensor_parallel
    resources = section.engine if section.engine is not None else _default(each if gpus else 0)
    return [ResourceBundle(f"server-{number}", resources) for number in range(count)]


def environment_bundles(section: ClusterConfig) -> list[ResourceBundle]:
    """Return the bundle of each actor that runs environments."""
    resources = section.environment if section.environment is not None else _default(0)
    return [ResourceBundle(f"{ENVIRONMENTS}{number}", resources) for number in range(section.environments)]


def _default(gpus: int) -> dict[str, float]:
    return {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}


def placement_words(config: Config) -> list[tuple[str, str, str]]:
    """Return table rows (part, placement and resources, config key); no rows without a cluster."""
    section = config.cluster
    if section is None:
        return []
    ranks = rank_bundles(config, section, gpus=False)
    engines = engine_bundles(config, section, gpus=False)
    started = section.address is None
    words = [
        (
            "cluster",
            "Ray, started here and stopped with the run" if started else f"Ray at {section.address}",
            f"cluster.address; {section.strategy} (cluster.strategy)",
        ),
        (HEAD, f"this process, with {_describe_resources(ranks[:1], section.rank)}", "cluster.rank"),
    ]
    if ranks[1:]:
        resources = _describe_resources(ranks[1:], section.rank)
        words.append((_names(ranks[1:]), f"an actor each, with {resources}", "cluster.rank"))
    if engines:
        resources = _describe_resources(engines, section.engine)
        words.append((_names(engines), f"an actor each, with {resources}", "cluster.engine"))
    if environments := environment_bundles(section):
        words.append((_names(environments), f"an actor each, with {environments[0].in_words}", "cluster.environment"))
    return words


def _describe_resources(bundles: Sequence[ResourceBundle], chosen: object) -> str:
    return bundles[0].in_words + (", and GPUs if there are any" if chosen is None else "")


def _names(bundles: Sequence[ResourceBundle]) -> str:
    return bundles[0].name if len(bundles) == 1 else f"{bundles[0].name} to {bundles[-1].name}"
