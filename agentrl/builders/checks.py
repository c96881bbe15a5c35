"""Checks of a config, before the run's folder is created; most are defined with their features."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.builders.adapter_checks import check_adapter_sync, check_adapters, check_role_adapters
from agentrl.builders.branches import check_branches
from agentrl.builders.cluster import check_cluster
from agentrl.builders.deadline_checks import check_deadlines
from agentrl.builders.environment_nodes import check_environment_nodes
from agentrl.builders.episodes import build_loop
from agentrl.builders.live import check_live
from agentrl.builders.rewards import check_comparison, check_reward_weights
from agentrl.builders.roles import build_roles, check_roles
from agentrl.builders.tinker import check_tinker
from agentrl.builders.tools import build_tools
from agentrl.config.config import Config
from agentrl.config.derived import evaluation_engine_config, per_environment_configs
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig, TinkerEngineConfig
from agentrl.config.step_settings import check_schedules, configs_at_points
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError
from agentrl.rollout.roles.environment_roles import roles_of_environment
from agentrl.serving.engine_checks import check_images
from agentrl.serving.launch.placement import check_cores
from agentrl.tool import Tool
from agentrl.training.algorithm_functions import check_sampling
from agentrl.training.mixture_trainer import check_mixture
from agentrl.training.signals.teacher import check_teacher
from agentrl.training.trainer import check_algorithm


def check_agents(config: Config) -> None:
    """Check roles, their tools, and the names of all tools.

    Raises:
        UsageError: a role is invalid, a tool is unknown, or a tool has a name that the agent loop reserves.
    """
    check_roles(config)
    for part in per_environment_configs(config):
        agent = part.config.agent
        loop = build_loop(agent, resolve_environment(part.config.sole_environment.name).answer_format)
        roles = build_roles(agent, loop, roles_of_environment(part.config))
        tools = [*build_tools(agent), *(tool for role in roles for tool in role.tools or ())]
        loop.check_tool_names([*(tool.name for tool in tools if isinstance(tool, Tool)), *agent.called_roles])


def check_evaluation_engine(config: Config) -> None:
    """Check that evaluations can run during training on ``evaluation.engine``, if it is set.

    Raises:
        ConfigError: training is synchronous, there are no evaluations, or the engine is not suitable.
    """
    other = evaluation_engine_config(config)
    if other is None:
        return
    engine = other.engine
    if config.rollout.is_synchronous:
        raise ConfigError(
            "evaluation.engine needs asynchronous training",
            got="rollout.max_staleness 0, with which training waits for every evaluation",
            expected="rollout.max_staleness of at least 1",
            hint="set rollout.max_staleness=1, or remove evaluation.engine",
        )
    if not config.evaluation.every:
        raise ConfigError("evaluation.engine has no effect", got="evaluation.every 0", expected="evaluation.every=N")
    if config.adapters:
        raise ConfigError(
            "evaluation.engine cannot serve several adapters", hint="remove evaluation.engine or adapters"
        )
    is_launched = isinstance(engine, ServerEngineConfig) and engine.servers == "launch"
    if is_launched or not isinstance(engine, ServerEngineConfig | LocalEngineConfig):
        raise ConfigError(
            "evaluation.engine cannot be used",
            got=f"{engine.type}{' with servers that the run would launch' if is_launched else ''}",
            expected="local, or vllm or sglang with the addresses of running servers",
            hint="start a server with agentrl serve, and set evaluation.engine.servers=[ADDRESS]",
        )
    if isinstance(engine, LocalEngineConfig) and engine.cpus is not None:
        raise ConfigError(
            "evaluation.engine.cpus has no effect",
            got="an engine in this process",
            hint="remove it, or set engine.cpus",
        )
    if isinstance(engine, ServerEngineConfig):
        _check_servers(config, engine)
    check_images(other)


def _check_servers(config: Config, engine: ServerEngineConfig) -> None:
    if engine.sleep:
        raise ConfigError("evaluation.engine.sleep has no effect", hint="remove it")
    own = config.engine.servers if isinstance(config.engine, ServerEngineConfig) else "launch"
    if shared := sorted(set(own) & set(engine.servers)) if isinstance(own, list) else []:
        raise ConfigError(
            "engine and evaluation.engine share servers, which cannot serve two weight versions",
            got=", ".join(shared),
            expected="different servers",
        )


def check_plan(config: Config) -> None:
    """Check the schedules and stages of a run, and the algorithm and sampling at each of their points.

    Raises:
        ConfigError: a key cannot change, or a value does not fit at some step.
    """
    check_schedules(config)
    for step, changed in configs_at_points(config).items():
        for check in (check_tinker, check_sampling, check_teacher, check_algorithm, check_mixture):
            try:
                check(changed)
            except ConfigError as error:
                what = f"at step {step} of the schedules: {error.what}"
                raise ConfigError(what, got=error.got, expected=error.expected, hint=error.hint) from None


FEATURE_CHECKS: tuple[Callable[[Config], None], ...] = (
    check_live,
    check_tinker,
    check_images,
    check_cluster,
    check_environment_nodes,
    check_sampling,
    check_teacher,
    check_adapters,
    check_adapter_sync,
    check_role_adapters,
    check_algorithm,
    check_reward_weights,
    check_comparison,
    check_evaluation_engine,
    check_branches,
    check_mixture,
    check_deadlines,
    check_cores,
    check_plan,
)
"""Checks of a training run's config by feature, in order."""


def check_training(config: Config) -> LocalEngineConfig | ServerEngineConfig | TinkerEngineConfig:
    """Check the config of a training run.

    Returns:
        The engine section.

    Raises:
        ConfigError: the engine cannot load new weights or does not accept the environment's images, sampling truncates
            the policy's distribution, the algorithm does not accept an option, or it lacks or does not need a critic.
        UnknownNameError: an unknown estimator, loss, filter or shaping.
    """
    if not config.has_environment:
        raise ConfigError(
            "training needs an environment",
            got="only sft.data or preferences.sources",
            expected="environment=NAME",
            hint="to train on a file, use agentrl sft or agentrl dpo",
        )
    if not isinstance(config.engine, LocalEngineConfig | ServerEngineConfig | TinkerEngineConfig):
        raise ConfigError(
            f"engine {config.engine.type} cannot be used for training",
            expected="an engine that loads new weights: local, vllm, sglang or tinker",
            hint="set engine=local; other engines can only evaluate",
        )
    for check in FEATURE_CHECKS:
        check(config)
    return config.engine
