"""Checks of a config before the run's folder is made: what kinds of runs, and features such as adapters, ask of it."""

from __future__ import annotations

import os
from collections.abc import Callable

from agentrl.builders.adapter_roles import check_role_adapters, refuse_role_adapters
from agentrl.builders.adapters import check_adapter_sync
from agentrl.builders.chat_file import read_chats
from agentrl.builders.environments import task_source
from agentrl.builders.episodes import build_loop
from agentrl.builders.models import SCRATCH
from agentrl.builders.pairs import check_sources
from agentrl.builders.ray.connection import RAY
from agentrl.builders.rewards import check_comparison, check_reward_weights
from agentrl.builders.scratch import has_expert
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.cluster import ClusterConfig
from agentrl.config.config import Config
from agentrl.config.derived import EnvironmentConfigs, per_environment_configs
from agentrl.config.engines import LocalEngineConfig, OpenAIEngineConfig, ServerEngineConfig
from agentrl.config.environment import HorizonConfig, PooledBy, PoolsConfig
from agentrl.engine import PolicyEngine
from agentrl.env_lookup import resolve_environment
from agentrl.errors import ConfigError, UsageError
from agentrl.models.lora import PEFT
from agentrl.serving.launch import usable_gpus
from agentrl.serving.launch.process import RETURN_ROUTES
from agentrl.training.objective import Objective
from agentrl.training.preferences import preference_loss
from agentrl.training.rewards import RewardShaping
from agentrl.training.signals import check_signals


def check_adapters(config: Config, *, may_drop_out: bool = False) -> None:
    """Check that adapters can be made, before anything else is.

    Args:
        config: Of a run that trains its model.
        may_drop_out: Whether no two forward passes have to agree.

    Raises:
        ConfigError: they have dropout where two forward passes or ranks must agree or in several lanes,
            ``trainer.tensor_parallel`` cannot cut them, or 4 bits are to be in shards.
        UsageError: the extra is not installed.
    """
    lora, trainer = config.model.lora, config.trainer
    if lora is None:
        return
    PEFT.load()
    if lora.dropout and not may_drop_out:
        raise ConfigError(
            "model.lora.dropout is of warm starts only",
            got=lora.dropout,
            expected="0: log-probabilities of the same tokens must be the same in two forward passes",
            hint="remove it; agentrl sft takes it",
        )
    if lora.dropout and trainer.lanes > 1:
        raise ConfigError(
            "model.lora.dropout draws from one generator, which lanes would take from each other",
            got=f"model.lora.dropout {lora.dropout:g} with trainer.lanes {trainer.lanes}",
            expected="trainer.lanes=1, or no dropout",
        )
    if lora.dropout and trainer.tensor_parallel > 1:
        raise ConfigError(
            "model.lora.dropout draws other numbers in ranks that compute the same tokens",
            got=f"model.lora.dropout {lora.dropout:g} with trainer.tensor_parallel {trainer.tensor_parallel}",
            expected="trainer.tensor_parallel=1, or no dropout",
        )
    if lora.rank % trainer.tensor_parallel:
        raise ConfigError(
            "trainer.tensor_parallel cannot cut the adapters evenly",
            got=f"model.lora.rank {lora.rank}, {trainer.tensor_parallel} ranks",
            expected="a rank that is a multiple of trainer.tensor_parallel",
        )
    if lora.quantize is not None and trainer.processes > 1:
        raise ConfigError(
            "weights in 4 bits cannot be in shards",
            got=f"model.lora.quantize {lora.quantize} with {trainer.processes} processes",
            expected="trainer.processes=1",
            hint="leave model.lora.quantize out: every process holds a part of the weights only",
        )


def refuse_adapters(config: Config, what: str) -> None:
    """Refuse adapters where none are made.

    Raises:
        ConfigError: the config has ``model.lora``.
    """
    if config.model.lora is not None:
        raise ConfigError(
            f"{what} trains all weights", got="model.lora", expected="no model.lora", hint="set model.lora=null"
        )


def add_reporting_flags(config: Config, section: ServerEngineConfig) -> ServerEngineConfig:
    """Return the engine's section, with the arguments that make launched servers report what the trainer needs.

    Raises:
        ConfigError: they would run on the CPU, where neither vLLM nor SGLang can.
    """
    if not config.trainer.router_replay or section.servers != "launch":
        return section
    if not usable_gpus(os.environ):
        raise ConfigError(
            "trainer.moe.router_replay needs servers that report routed experts, which vLLM and SGLang do on GPUs only",
            got=f"engine {config.engine.type} without a GPU",
            hint="set engine=local, or trainer.moe.router_replay=false",
        )
    if RETURN_ROUTES in section.arguments:
        return section
    return section.model_copy(update={"arguments": [*section.arguments, RETURN_ROUTES]})


def check_engine_reports(config: Config, engine: PolicyEngine) -> None:
    """Check that an engine reports what the trainer needs: with replayed routed experts, the experts of each token.

    Raises:
        ConfigError: it reports none.
    """
    if config.trainer.router_replay and not engine.capabilities.routed_experts:
        raise ConfigError(
            "trainer.moe.router_replay needs an engine that reports the experts of each token",
            got=f"engine {config.engine.type}, which does not",
            expected=f"engine=local, or servers that were started with {RETURN_ROUTES}",
            hint="add it to engine.arguments, or set trainer.moe.router_replay=false",
        )


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
    limits = {_name(part): _most_turns(part) for part in per_environment_configs(config)}
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


def _most_turns(part: EnvironmentConfigs) -> int:
    environment = part.config.sole_environment
    own = resolve_environment(environment.name).turns_under(environment.options)
    return min(part.config.agent.max_turns, own or part.config.agent.max_turns)


def _check_pools(config: Config, pools: PoolsConfig) -> None:
    parts = per_environment_configs(config)
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


def _check_typed(part: EnvironmentConfigs) -> None:
    environment = part.config.sole_environment
    if task_source(resolve_environment(environment.name), environment)[0].type is None:
        raise ConfigError(
            "curriculum.pools.by type needs tasks that say their type",
            got=f"tasks of {_name(part)} without one",
            expected="types",
            hint="set curriculum.pools.by to task or environment",
        )


def _check_walked_twice(config: Config, parts: tuple[EnvironmentConfigs, ...]) -> None:
    """Check that tasks come again, for only then are they judged: somewhere there must be fewer tasks than turns."""
    turns = config.trainer.steps * config.trainer.tasks_per_step
    weights = sum(part.weight for part in parts)
    sizes = {}
    for part in parts:
        environment = part.config.sole_environment
        sizes[_name(part)] = len(task_source(resolve_environment(environment.name), environment))
        if turns * part.weight / weights > sizes[_name(part)]:
            return
    raise ConfigError(
        "curriculum.pools.by task never meets a task again in this run",
        got=f"{turns:,} groups, and " + ", ".join(f"{size:,} tasks of {name}" for name, size in sizes.items()),
        expected="fewer tasks than groups",
        hint="judge types or environments (curriculum.pools.by), or take fewer tasks: a file (environment.tasks)",
    )


def _name(part: EnvironmentConfigs) -> str:
    return part.label or part.config.sole_environment.name


SINGLE_GPU = "cuda:"


def check_cluster(config: Config) -> None:
    """Check that a run can be placed as its config says.

    Raises:
        ConfigError: a key that a cluster makes meaningless, or that cannot work on one.
        UsageError: Ray is not installed.
    """
    section = config.cluster
    if section is None:
        return
    if config.model.device.startswith(SINGLE_GPU):
        raise ConfigError(
            "model.device names a GPU, and the cluster gives them out",
            got=config.model.device,
            expected="auto, cpu or cuda",
        )
    engine = config.engine
    if isinstance(engine, ServerEngineConfig):
        _check_servers(engine, section)
    launches = isinstance(engine, LocalEngineConfig) or getattr(engine, "servers", None) == "launch"
    if section.engine is not None and not launches:
        raise ConfigError("cluster.engine is ignored with addresses in engine.servers", hint="remove one of them")
    if section.engines != 1 and not isinstance(engine, LocalEngineConfig):
        raise ConfigError(
            f"cluster.engines is ignored with engine {engine.type}",
            got=section.engines,
            hint="set engine.replicas, or engine=local",
        )
    if not RAY.is_installed:
        raise UsageError(
            "the extra ray is not installed", expected="the package ray", hint='install it: pip install "agentrl[ray]"'
        )


def _check_servers(engine: ServerEngineConfig, section: ClusterConfig) -> None:
    if engine.transport == "cuda_ipc":
        raise ConfigError(
            "engine.transport cuda_ipc is for a server on the trainer's GPU",
            got="a cluster, which gives each its own",
            expected="collective, disk, tensor (SGLang), or shared_memory on one machine",
        )
    if engine.gpus is not None:
        raise ConfigError(
            "engine.gpus is ignored with cluster, which gives GPUs out", got=engine.gpus, hint="remove engine.gpus"
        )
    asked = (section.engine or {}).get("GPU")
    if asked is not None and asked not in (0, engine.tensor_parallel):
        raise ConfigError(
            "cluster.engine gives a server another number of GPUs than it uses",
            got=f"GPU {asked:g} with engine.tensor_parallel {engine.tensor_parallel}",
            expected=f"GPU {engine.tensor_parallel}",
        )


def refuse_cluster(config: Config, what: str) -> None:
    """Refuse a cluster where nothing is placed on one.

    Args:
        config: The run's.
        what: Name of the run in messages.

    Raises:
        ConfigError: the config asks for one.
    """
    if config.cluster is not None:
        raise ConfigError(f"{what} runs on this machine", got="the key cluster", hint="remove it: cluster=null")


_WHOLE = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def check_training(config: Config) -> LocalEngineConfig | ServerEngineConfig:
    """Check that a policy can be trained as the config says.

    Returns:
        The engine's settings.

    Raises:
        ConfigError: an engine that takes no weights, or no images where the environment shows some, sampling from
            another distribution than the policy's own, options that the algorithm does not take, or a critic that it
            does not have or does not need.
        UnknownNameError: no such estimator, loss, filter or shaping.
    """
    if not config.has_environment:
        raise ConfigError(
            "there is no environment to train in",
            got="sft.data alone",
            expected="environment=NAME",
            hint="agentrl sft learns from a file",
        )
    if not isinstance(config.engine, LocalEngineConfig | ServerEngineConfig):
        raise ConfigError(
            f"engine {config.engine.type} cannot be trained",
            expected="an engine that takes new weights: local, vllm or sglang",
            hint="set engine=local; other engines evaluate",
        )
    for check in FEATURE_CHECKS:
        check(config)
    return config.engine


def _check_algorithm(config: Config) -> None:
    """Check that estimator, loss and what they read fit each other."""
    Objective(config.algorithm)
    check_reward_weights(config)
    check_comparison(config)
    check_signals(config.algorithm, config.trainer, has_adapters=config.model.lora is not None)
    RewardShaping(config.algorithm.shaping, max_tokens=config.agent.max_tokens)


def _check_teacher(config: Config) -> None:
    """Check a teacher: a server answers at temperature 1, and ranks that share rows ask about one token at a time."""
    teacher, temperature = config.algorithm.teacher, config.sampling.temperature
    if teacher is not None and teacher.top_k is not None and config.trainer.context_parallel > 1:
        raise ConfigError(
            "algorithm.teacher.top_k needs whole rows",
            got=f"trainer.context_parallel {config.trainer.context_parallel}",
            expected="trainer.context_parallel=1, or algorithm.loss=distill without top_k",
        )
    if teacher is not None and teacher.servers and temperature != 1.0:
        raise ConfigError(
            "a teacher behind servers speaks at temperature 1, and is compared with the policy as it sampled",
            got=f"sampling.temperature {temperature:g}",
            expected="sampling.temperature=1",
            hint="a teacher without algorithm.teacher.servers is loaded, and takes any temperature",
        )


def check_images(config: Config) -> None:
    """Check that the engine takes images where an environment shows any.

    Raises:
        ConfigError: it does not.
    """
    if isinstance(config.engine, LocalEngineConfig | OpenAIEngineConfig):
        return
    for environment in (part.config.sole_environment for part in per_environment_configs(config)):
        spec = resolve_environment(environment.name)
        if spec.shows_images(environment.options):
            raise ConfigError(
                f"engine {config.engine.type} does not take images",
                got=f"environment {spec.name}, which shows images under its options",
                expected="engine=local (or, to evaluate, engine=openai)",
                hint="or let the environment show text",
            )


def _check_sampling(config: Config) -> None:
    """Check that recorded log-probabilities are those of the whole distribution at the temperature."""
    sampling = config.sampling
    wrong = {name: value for name, whole in _WHOLE.items() if (value := getattr(sampling, name)) != whole}
    if sampling.temperature == 0:
        wrong["temperature"] = 0
    if wrong:
        raise ConfigError(
            "training samples from the policy's whole distribution",
            got=", ".join(f"sampling.{name} {value}" for name, value in wrong.items()),
            expected="a temperature above 0, and no top_p, top_k or min_p",
            hint="evaluations may sample otherwise: evaluation.sampling={temperature: 0}",
        )


FEATURE_CHECKS: tuple[Callable[[Config], None], ...] = (
    check_images,
    check_cluster,
    _check_sampling,
    _check_teacher,
    check_adapters,
    check_adapter_sync,
    check_role_adapters,
    _check_algorithm,
)
"""What each feature asks of the config of a training run, in the order of the checks."""


def check_preferences(config: Config) -> None:
    """Check that a policy can learn from pairs as the config says.

    Raises:
        ConfigError: the loss does not learn from pairs, or not with these options, or adapters that do not fit.
    """
    refuse_role_adapters(config, "agentrl dpo")
    check_adapters(config)
    preference_loss(config.preferences or PreferencesConfig())


def check_reward_training(config: Config) -> None:
    """Check that a reward model can be trained as the config says.

    Raises:
        ConfigError: no sources, a model that would have to be made first, shared rows or matrices, adapters, or
            settings of a loss.
        UsageError: a source is not there.
    """
    refuse_adapters(config, "agentrl reward-model")
    refuse_role_adapters(config, "agentrl reward-model")
    settings = config.preferences or PreferencesConfig()
    check_sources(settings)
    if config.model.path == SCRATCH:
        raise ConfigError(
            "a reward model starts from a language model",
            got=f"model.path {SCRATCH}",
            expected="--model, a folder, a name or a run",
        )
    trainer = config.trainer
    if trainer.kernels == "liger":
        raise ConfigError("Liger's kernels are for policies", got="trainer.kernels liger", expected="another kind")
    if trainer.context_parallel * trainer.tensor_parallel > 1:
        raise ConfigError(
            "a reward model is shared by shards alone",
            got=f"trainer.context_parallel {trainer.context_parallel}, trainer.tensor_parallel "
            f"{trainer.tensor_parallel}",
            expected="1 and 1; trainer.processes may be more",
        )
    if settings.loss != PreferencesConfig().loss or settings.loss_options:
        raise ConfigError(
            "preferences.loss is ignored: the loss of a reward model is that of Bradley and Terry",
            got=f"{settings.loss} {settings.loss_options or ''}".strip(),
            expected="no preferences.loss and no preferences.loss_options",
        )


def check_warm_start(config: Config) -> None:
    """Check that an expert can demonstrate, or that there is a file to learn from.

    Raises:
        ConfigError: a cluster is to be used, or a new model is to learn from a file.
        UsageError: there is no such file, or it holds something else; the environment has no expert, or the agent loop
            cannot be demonstrated.
    """
    refuse_cluster(config, "a warm start")
    refuse_role_adapters(config, "agentrl sft")
    check_adapters(config, may_drop_out=True)
    if config.sft.data is None:
        check_experts(config)
        return
    read_chats(config.sft.data)
    if config.model.path == SCRATCH:
        raise ConfigError(
            "sft.data needs a model",
            got="model.path scratch, whose vocabulary is made from an environment's text",
            expected="a folder or a name",
            hint="set model.path, or --model",
        )


def check_experts(config: Config) -> None:
    """Check that every environment has an expert that can demonstrate.

    Raises:
        UsageError: an environment has no expert, or its agent loop cannot be demonstrated.
    """
    for part in per_environment_configs(config):
        spec = resolve_environment(part.config.sole_environment.name)
        if not has_expert(spec, part.config):
            raise UsageError(
                f"environment {spec.name} has no expert to demonstrate",
                expected="an environment with an expert() method",
                hint="train from rewards alone: agentrl train, without algorithm.expert",
            )
        loop = build_loop(part.config.agent)
        if loop.demonstration_problem():
            loop.demonstrate("")
