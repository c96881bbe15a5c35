"""Checks of a run's adapters: one that is trained (``model.lora``), or one per role (``adapters``, ``agent.roles``)."""

from __future__ import annotations

from agentrl.config.config import LABEL, Config
from agentrl.config.derived import adapter_config, make_agent_loop, per_environment_configs
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig, VLLMEngineConfig
from agentrl.config.environment import BASE
from agentrl.errors import ConfigError, did_you_mean
from agentrl.models.lora import PEFT
from agentrl.rollout.roles.environment_roles import roles_of_environment
from agentrl.training.signals import check_signals
from agentrl.training.signals.without_model import needs_greedy_rollouts
from agentrl.trajectory import SOLE_ROLE


def sends_adapters(engine: object) -> bool:
    """Return True if weight sync sends only adapters."""
    return isinstance(engine, ServerEngineConfig) and engine.adapter_rank is not None


def check_adapter_sync(config: Config) -> None:
    """Check that the trained weights can be sent as adapters.

    Raises:
        ConfigError: the model has no adapters, their rank is too large, or other weights change as well.
    """
    engine, lora = config.engine, config.model.lora
    if not isinstance(engine, ServerEngineConfig) or engine.adapter_rank is None:
        return
    if lora is None:
        raise ConfigError(
            "engine.adapter_rank sends only adapters, but all weights are trained",
            got="no model.lora",
            expected="model.lora, or no engine.adapter_rank",
        )
    if lora.rank > engine.adapter_rank:
        raise ConfigError(
            "the adapters' rank is larger than the servers' limit",
            got=f"model.lora.rank {lora.rank} with engine.adapter_rank {engine.adapter_rank}",
            expected=f"engine.adapter_rank={lora.rank} or more",
        )
    if lora.modules_to_save:
        raise ConfigError(
            "engine.adapter_rank sends only adapters, but some modules are trained whole",
            got=f"model.lora.modules_to_save {lora.modules_to_save}",
            expected="no model.lora.modules_to_save, or no engine.adapter_rank",
        )
    if lora.quantize is not None:
        raise ConfigError(
            "with engine.adapter_rank, servers keep the original base weights, but the trainer's are in 4 bits",
            got=f"model.lora.quantize {lora.quantize}",
            expected="no engine.adapter_rank, so that servers get the trainer's merged weights",
        )


def check_adapters(config: Config, *, allows_dropout: bool = False) -> None:
    """Check that the run's adapters can be created.

    Args:
        config: Config of a run that trains its model.
        allows_dropout: True if no two forward passes have to agree.

    Raises:
        ConfigError: dropout where two forward passes or ranks must agree, or with several threads; a rank that
            ``trainer.tensor_parallel`` cannot divide; or sharded 4-bit weights.
        UsageError: the extra ``lora`` is not installed.
    """
    lora, trainer = config.model.lora, config.trainer
    if lora is None:
        return
    PEFT.load()
    if lora.dropout and not allows_dropout:
        raise ConfigError(
            "model.lora.dropout works with agentrl sft only",
            got=lora.dropout,
            expected="0: two forward passes over the same tokens must give the same log-probabilities",
            hint="remove it; agentrl sft supports it",
        )
    if lora.dropout and trainer.lanes > 1:
        raise ConfigError(
            "model.lora.dropout draws from one random generator, which threads cannot share reproducibly",
            got=f"model.lora.dropout {lora.dropout:g} with trainer.lanes {trainer.lanes}",
            expected="trainer.lanes=1, or no dropout",
        )
    if lora.dropout and trainer.tensor_parallel > 1:
        raise ConfigError(
            "model.lora.dropout draws different numbers in ranks that compute the same tokens",
            got=f"model.lora.dropout {lora.dropout:g} with trainer.tensor_parallel {trainer.tensor_parallel}",
            expected="trainer.tensor_parallel=1, or no dropout",
        )
    if lora.rank % trainer.tensor_parallel:
        raise ConfigError(
            "trainer.tensor_parallel cannot split the adapters evenly",
            got=f"model.lora.rank {lora.rank}, {trainer.tensor_parallel} ranks",
            expected="a rank that is a multiple of trainer.tensor_parallel",
        )
    if lora.quantize is not None and trainer.processes > 1:
        raise ConfigError(
            "4-bit weights cannot be sharded",
            got=f"model.lora.quantize {lora.quantize} with {trainer.processes} processes",
            expected="trainer.processes=1",
            hint="remove model.lora.quantize: with several processes, each holds only a part of the weights",
        )


def refuse_adapters(config: Config, what: str) -> None:
    """Check that a run that trains all weights has no adapters.

    Raises:
        ConfigError: the config has ``model.lora``.
    """
    if config.model.lora is not None:
        raise ConfigError(
            f"{what} trains all weights", got="model.lora", expected="no model.lora", hint="set model.lora=null"
        )


def roles_of_adapters(config: Config) -> dict[str, str]:
    """Return the adapter of each role in all environments, without the roles that the base model plays.

    Raises:
        ConfigError: a role has different adapters in two environments.
    """
    found: dict[str, str] = {}
    for part in per_environment_configs(config):
        for role, section in (part.config.agent.roles or {}).items():
            if section.adapter is None or section.adapter == BASE:
                continue
            if found.setdefault(role, section.adapter) != section.adapter:
                raise ConfigError(
                    f"role {role} has different adapters in two environments",
                    got=f"{found[role]} and {section.adapter}",
                    expected="one adapter, or different role names",
                )
    return found


def trained_roles(config: Config) -> dict[str, frozenset[str]]:
    """Return the roles that train each trained adapter."""
    untrained = {
        role
        for part in per_environment_configs(config)
        for role, section in (part.config.agent.roles or {}).items()
        if not section.is_trained or role in roles_of_environment(part.config)
    }
    plays = roles_of_adapters(config)
    return {
        name: frozenset(role for role, adapter in plays.items() if adapter == name and role not in untrained)
        for name, section in config.named_adapters.items()
        if section.trained
    }


def check_role_adapters(config: Config) -> None:
    """Check that every role has an adapter if the run has several, and that its features support several adapters.

    Raises:
        ConfigError: a role has no adapter, an adapter has no role, or a feature does not work with several adapters.
    """
    _check_roles(config)
    if config.named_adapters:
        _check_features(config)
        for name, section in config.named_adapters.items():
            own = adapter_config(config, name)
            if section.trained:
                check_signals(own.algorithm, own.trainer, has_adapters=True)
                _check_estimator(config, own, name)


def refuse_role_adapters(config: Config, what: str) -> None:
    """Check that a run that trains one model has no named adapters.

    Raises:
        ConfigError: the config has named adapters.
    """
    if config.named_adapters:
        raise ConfigError(
            f"{what} trains one model", got=f"adapters {', '.join(config.named_adapters)}", hint="set adapters=null"
        )


def _check_roles(config: Config) -> None:
    named: set[str] = set()
    for part in per_environment_configs(config):
        agent = part.config.agent
        sections = agent.roles or {}
        for role, section in sections.items():
            if section.adapter is not None:
                _check_name(config, role, section.adapter)
                named.add(section.adapter)
        if not config.named_adapters:
            continue
        others = roles_of_environment(part.config)
        roles = [*(make_agent_loop(agent.loop, agent.options).roles or ([SOLE_ROLE] if others else [])), *others]
        if not roles:
            raise ConfigError(
                f"adapters are assigned to roles, but the agent loop {agent.loop} has none",
                got=f"adapters {', '.join(config.named_adapters)}",
                expected="a loop with several agents, or only model.lora, which is one adapter",
            )
        for role in roles:
            own = sections.get(role)
            if own is None or (own.adapter is None and not own.has_own_policy):
                raise ConfigError(
                    f"agent.roles.{role} does not name an adapter",
                    expected=f"adapter: {' or '.join([*config.named_adapters, BASE])}",
                    hint=f"set agent.roles.{role}.adapter={next(iter(config.named_adapters))}",
                )
    if unused := [name for name in config.named_adapters if name not in named]:
        raise ConfigError(
            f"no role uses adapters.{unused[0]}",
            expected="agent.roles.ROLE.adapter of at least one role",
            hint=f"remove it, or set agent.roles.ROLE.adapter={unused[0]}",
        )
    if config.named_adapters:
        _check_learns(config)


def _check_name(config: Config, role: str, name: str) -> None:
    if not config.named_adapters or (name != BASE and name not in config.named_adapters):
        known = [*config.named_adapters, *([BASE] if config.named_adapters else [])]
        raise ConfigError(
            f"agent.roles.{role}.adapter is not an adapter of the run",
            got=name,
            expected=", ".join(known) or "adapters: {NAME: {}, …}, or roles without adapter",
            hint=did_you_mean(name, known) or None,
        )


def _check_learns(config: Config) -> None:
    trained = trained_roles(config)
    for name in config.named_adapters:
        if name == BASE or not LABEL.fullmatch(name):
            raise ConfigError(
                f"adapters: {name!r} is not a valid name", expected=f"letters, digits, - and _, and not {BASE}"
            )
    for name, roles in trained.items():
        if not roles:
            raise ConfigError(
                f"no trained role uses adapters.{name}",
                got="roles with trained: false",
                hint=f"set adapters.{name}.trained=false with a path, or let one of its roles train",
            )
    if not trained:
        raise ConfigError("no adapter is trained", got=", ".join(config.named_adapters), expected="at least one")
    for part in per_environment_configs(config):
        for role, section in (part.config.agent.roles or {}).items():
            if section.trained and section.adapter is not None and section.adapter not in trained:
                raise ConfigError(
                    f"agent.roles.{role}.trained is set, but its adapter is not trained",
                    got=f"adapters.{section.adapter}.trained false",
                    hint=f"remove agent.roles.{role}.trained",
                )


def _check_features(config: Config) -> None:
    lora, trainer, engine = config.model.lora, config.trainer, config.engine
    if lora is None:
        raise ConfigError(
            "adapters need model.lora, which sets their size",
            got="training of all weights",
            expected="model.lora={rank: 16}",
        )
    excluded = {
        "model.lora.modules_to_save": lora.modules_to_save,
        "model.lora.quantize": lora.quantize,
        "trainer.processes": trainer.processes if trainer.processes > 1 else None,
        "trainer.critic": trainer.critic and "set",
        "trainer.process_reward": trainer.process_reward and "set",
        "cluster": config.cluster and "set",
    }
    for key, value in excluded.items():
        if value:
            raise ConfigError(
                f"{key} does not work with several adapters",
                got=f"{key} {value} with adapters {', '.join(config.named_adapters)}",
                expected=f"no {key}, or model.lora without adapters",
            )
    if isinstance(engine, ServerEngineConfig):
        _check_servers(config, engine, lora.rank)
    elif not isinstance(engine, LocalEngineConfig):
        raise ConfigError(
            "adapters need an engine that supports them", got=f"engine {engine.type}", expected="local or vllm"
        )


def _check_servers(config: Config, engine: ServerEngineConfig, rank: int) -> None:
    if not isinstance(engine, VLLMEngineConfig):
        raise ConfigError(
            "SGLang replaces an adapter only while no request uses it, but weight sync holds running requests",
            got=f"engine sglang with adapters {', '.join(config.named_adapters)}",
            expected="engine=local or engine=vllm",
        )
    if engine.adapter_rank is None or engine.max_adapters < len(config.named_adapters):
        raise ConfigError(
            "the servers cannot hold the adapters",
            got=f"engine.adapter_rank {engine.adapter_rank}, engine.max_adapters {engine.max_adapters}",
            expected=f"{len(config.named_adapters)} adapters of rank {rank}",
            hint=f"set engine.adapter_rank={rank} engine.max_adapters={len(config.named_adapters)}",
        )


def _check_estimator(config: Config, own: Config, name: str) -> None:
    """Check that groups have greedy rollouts if an adapter's own advantage estimator needs them."""
    if needs_greedy_rollouts(own.algorithm) and not needs_greedy_rollouts(config.algorithm):
        raise ConfigError(
            f"adapters.{name}.algorithm.advantage needs greedy rollouts, but algorithm.advantage does not add them",
            got=f"{own.algorithm.advantage}, with algorithm.advantage {config.algorithm.advantage}",
            expected=f"algorithm.advantage={own.algorithm.advantage}, and the other estimator under the other adapters",
        )
