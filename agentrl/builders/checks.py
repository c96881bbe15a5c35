"""Checks of a config for each kind of run and each feature, before the run's folder is created."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.builders.adapters import (
    check_adapter_sync,
    check_adapters,
    check_role_adapters,
    refuse_adapters,
    refuse_role_adapters,
)
from agentrl.builders.group_extras import check_experts
from agentrl.builders.pairs import check_sources
from agentrl.builders.ray.connection import RAY
from agentrl.builders.rewards import check_comparison, check_reward_weights
from agentrl.config.algorithm import PreferencesConfig
from agentrl.config.cluster import ClusterConfig
from agentrl.config.config import SCRATCH, Config
from agentrl.config.derived import EnvironmentConfigs, per_environment_configs
from agentrl.config.engines import LocalEngineConfig, OpenAIEngineConfig, ServerEngineConfig
from agentrl.config.environment import HorizonConfig, PooledBy, PoolsConfig
from agentrl.env_lookup import resolve_environment
from agentrl.errors import ConfigError, UsageError
from agentrl.rollout.task_source import task_source
from agentrl.training.chat_file import read_chats
from agentrl.training.objective import Objective
from agentrl.training.preferences import preference_loss
from agentrl.training.rewards import RewardShaping
from agentrl.training.signals import check_signals


def check_curriculum(config: Config) -> None:
    """Check that the curriculum has an effect within the run.

    Raises:
        ConfigError: a horizon that no environment allows, or stages or pools that never change the sampled tasks.
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
            "curriculum.horizon.turns is longer than the longest episode",
            got=horizon.turns[-1],
            expected=f"at most {most} turns",
            hint="limits: "
            + ", ".join(f"{name} {turns}" for name, turns in limits.items())
            + "; each is the smaller of the environment's limit and agent.max_turns",
        )

    last = max([*(horizon.at_steps or []), horizon.over_steps if horizon.success_above is not None else 0])
    if last >= steps:
        raise ConfigError(
            "curriculum.horizon grows after the end of the run",
            got=f"step {last}",
            expected=f"a step before trainer.steps, {steps}",
            hint="remove the last stage, or train longer",
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
                "curriculum.pools.by environment needs several environments",
                got="one environment",
                expected="several, such as sizes of one puzzle",
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
            "curriculum.pools.by type needs tasks with a type",
            got=f"tasks of {_name(part)} without a type",
            expected="tasks with a type",
            hint="set curriculum.pools.by to task or environment",
        )


def _check_walked_twice(config: Config, parts: tuple[EnvironmentConfigs, ...]) -> None:
    """Require that at least one task repeats: pools by task estimate the success of repeated tasks."""
    turns = config.trainer.steps * config.trainer.tasks_per_step
    weights = sum(part.weight for part in parts)
    sizes = {}
    for part in parts:
        environment = part.config.sole_environment
        sizes[_name(part)] = len(task_source(resolve_environment(environment.name), environment))
        if turns * part.weight / weights > sizes[_name(part)]:
            return
    raise ConfigError(
        "curriculum.pools.by task has no effect: no task repeats in this run",
        got=f"{turns:,} groups, and " + ", ".join(f"{size:,} tasks of {name}" for name, size in sizes.items()),
        expected="fewer tasks than groups",
        hint="set curriculum.pools.by to type or environment, or use fewer tasks, from a file (environment.tasks)",
    )


def _name(part: EnvironmentConfigs) -> str:
    return part.label or part.config.sole_environment.name


SINGLE_GPU = "cuda:"


def check_cluster(config: Config) -> None:
    """Check that a run can be placed on its cluster.

    Raises:
        ConfigError: a key that has no effect, or does not work, on a cluster.
        UsageError: Ray is not installed.
    """
    section = config.cluster
    if section is None:
        return
    if config.model.device.startswith(SINGLE_GPU):
        raise ConfigError(
            "model.device names a GPU, but the cluster assigns GPUs",
            got=config.model.device,
            expected="auto, cpu or cuda",
        )
    engine = config.engine
    if isinstance(engine, ServerEngineConfig):
        _check_servers(engine, section)
    launches = isinstance(engine, LocalEngineConfig) or getattr(engine, "servers", None) == "launch"
    if section.engine is not None and not launches:
        raise ConfigError(
            "cluster.engine is ignored if engine.servers has addresses", hint="remove cluster.engine or engine.servers"
        )
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
            "engine.transport cuda_ipc needs servers on the trainer's GPU",
            got="a cluster, which assigns separate GPUs",
            expected="collective, disk, tensor (SGLang), or shared_memory on one machine",
        )
    if engine.gpus is not None:
        raise ConfigError(
            "engine.gpus is ignored on a cluster, which assigns GPUs", got=engine.gpus, hint="remove engine.gpus"
        )
    requested = (section.engine or {}).get("GPU")
    if requested is not None and requested not in (0, engine.tensor_parallel):
        raise ConfigError(
            "cluster.engine reserves another number of GPUs than a server uses",
            got=f"GPU {requested:g} with engine.tensor_parallel {engine.tensor_parallel}",
            expected=f"GPU {engine.tensor_parallel}",
        )


def refuse_cluster(config: Config, what: str) -> None:
    """Check that a run on this machine only has no cluster.

    Args:
        config: Config of the run.
        what: Name of the run in messages.

    Raises:
        ConfigError: the config has a cluster.
    """
    if config.cluster is not None:
        raise ConfigError(f"{what} runs on this machine", got="the key cluster", hint="remove it: cluster=null")


_WHOLE = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def check_training(config: Config) -> LocalEngineConfig | ServerEngineConfig:
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
            got="only sft.data",
            expected="environment=NAME",
            hint="to train on a file, use agentrl sft",
        )
    if not isinstance(config.engine, LocalEngineConfig | ServerEngineConfig):
        raise ConfigError(
            f"engine {config.engine.type} cannot be used for training",
            expected="an engine that loads new weights: local, vllm or sglang",
            hint="set engine=local; other engines can only evaluate",
        )
    for check in FEATURE_CHECKS:
        check(config)
    return config.engine


def _check_algorithm(config: Config) -> None:
    """Check that the estimator, the loss, and their inputs and options are compatible."""
    Objective(config.algorithm)
    check_reward_weights(config)
    check_comparison(config)
    check_signals(config.algorithm, config.trainer, has_adapters=config.model.lora is not None)
    RewardShaping(config.algorithm.shaping, max_tokens=config.agent.max_tokens)


def _check_teacher(config: Config) -> None:
    """Check the teacher: top-k needs whole rows, and a served teacher supports only temperature 1."""
    teacher, temperature = config.algorithm.teacher, config.sampling.temperature
    if teacher is not None and teacher.top_k is not None and config.trainer.context_parallel > 1:
        raise ConfigError(
            "algorithm.teacher.top_k needs whole rows",
            got=f"trainer.context_parallel {config.trainer.context_parallel}",
            expected="trainer.context_parallel=1, or algorithm.loss=distill without top_k",
        )
    if teacher is not None and teacher.servers and temperature != 1.0:
        raise ConfigError(
            "a served teacher reports log-probabilities at temperature 1, but the policy uses another temperature",
            got=f"sampling.temperature {temperature:g}",
            expected="sampling.temperature=1",
            hint="without algorithm.teacher.servers, the trainer loads the teacher and supports any temperature",
        )


def check_images(config: Config) -> None:
    """Check that the engine accepts images if an environment shows any.

    Raises:
        ConfigError: the engine does not accept images.
    """
    if isinstance(config.engine, LocalEngineConfig | OpenAIEngineConfig):
        return
    for environment in (part.config.sole_environment for part in per_environment_configs(config)):
        spec = resolve_environment(environment.name)
        if spec.shows_images(environment.options):
            raise ConfigError(
                f"engine {config.engine.type} does not accept images",
                got=f"environment {spec.name}, which shows images under its options",
                expected="engine=local (or, to evaluate, engine=openai)",
                hint="or let the environment show text",
            )


def _check_sampling(config: Config) -> None:
    """Check that sampling uses the whole distribution, without truncation and at a temperature above 0."""
    sampling = config.sampling
    wrong = {name: value for name, whole in _WHOLE.items() if (value := getattr(sampling, name)) != whole}
    if sampling.temperature == 0:
        wrong["temperature"] = 0
    if wrong:
        raise ConfigError(
            "training must sample from the policy's whole distribution",
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
"""Checks of a training run's config by feature, in order."""


def check_preferences(config: Config) -> None:
    """Check the config of preference training.

    Raises:
        ConfigError: the loss is not a preference loss or does not accept an option, or the adapters are invalid.
    """
    refuse_role_adapters(config, "agentrl dpo")
    check_adapters(config)
    preference_loss(config.preferences or PreferencesConfig())


def check_reward_training(config: Config) -> None:
    """Check the config of reward model training.

    Raises:
        ConfigError: no sources, a model from scratch, context or tensor parallelism, adapters, or loss settings.
        UsageError: a source does not exist.
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
        raise ConfigError(
            "Liger's kernels do not support reward models", got="trainer.kernels liger", expected="other kernels"
        )
    if trainer.context_parallel * trainer.tensor_parallel > 1:
        raise ConfigError(
            "a reward model supports only sharding across processes",
            got=f"trainer.context_parallel {trainer.context_parallel}, trainer.tensor_parallel "
            f"{trainer.tensor_parallel}",
            expected="1 and 1; trainer.processes may be more than 1",
        )
    if settings.loss != PreferencesConfig().loss or settings.loss_options:
        raise ConfigError(
            "preferences.loss is ignored: a reward model uses the Bradley-Terry loss",
            got=f"{settings.loss} {settings.loss_options or ''}".strip(),
            expected="no preferences.loss and no preferences.loss_options",
        )


def check_warm_start(config: Config) -> None:
    """Check the config of SFT: the file can be read, or every environment has an expert.

    Raises:
        ConfigError: the config has a cluster or named adapters, or a model from scratch would be trained on a file.
        UsageError: the file does not exist or is invalid, an environment has no expert, or its agent loop does not
            support demonstrations.
    """
    refuse_cluster(config, "a warm start")
    refuse_role_adapters(config, "agentrl sft")
    check_adapters(config, allows_dropout=True)
    if config.sft.data is None:
        check_experts(config)
        return
    read_chats(config.sft.data)
    if config.model.path == SCRATCH:
        raise ConfigError(
            "sft.data needs a model",
            got="model.path scratch, whose vocabulary comes from an environment's text",
            expected="a folder or a name",
            hint="set model.path, or --model",
        )
