"""What only one kind of run asks of a config, checked before the run's folder is made."""

from __future__ import annotations

from agentrl.agent_loop import AgentLoop
from agentrl.assembly.adapter_check import check_adapters, refuse_adapters
from agentrl.assembly.adapter_sync import check_adapter_sync
from agentrl.assembly.chat_file import read_chats
from agentrl.assembly.cluster_check import check_cluster, refuse_cluster
from agentrl.assembly.environments import find_environment
from agentrl.assembly.episodes import build_loop
from agentrl.assembly.judges import check_reward_weights
from agentrl.assembly.models import SCRATCH
from agentrl.assembly.scratch import has_expert
from agentrl.assembly.stored_pairs import check_sources
from agentrl.config.engines import LocalEngineConfig, OpenAIEngineConfig, ServerEngineConfig
from agentrl.config.parts import parts_of
from agentrl.config.preferences import PreferencesConfig
from agentrl.config.schema import Config, SamplingConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.training.critic.checks import check_critic
from agentrl.training.models.rounds import check_rounds
from agentrl.training.objective import Objective
from agentrl.training.preferences.trainer import preference_loss
from agentrl.training.process_reward.checks import check_process_reward
from agentrl.training.step.rewards import RewardShaping

_WHOLE = SamplingConfig().model_dump()


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
    check_images(config)
    check_cluster(config)
    _check_sampling(config.sampling)
    _check_teacher(config)
    check_adapters(config)
    check_adapter_sync(config)
    objective = Objective(config.algorithm)
    check_reward_weights(config)
    has_adapters = config.model.lora is not None
    check_rounds(config.algorithm, has_reference=objective.uses_reference, has_adapters=has_adapters)
    check_critic(config.algorithm, config.trainer)
    check_process_reward(config.algorithm, config.trainer)
    RewardShaping(config.algorithm.shaping, max_tokens=config.agent.max_tokens)
    return config.engine


def _check_teacher(config: Config) -> None:
    """A server tells what its model says at temperature 1; ranks that share rows ask about one token at a time."""
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
    for environment in (part.config.sole_environment for part in parts_of(config)):
        spec = find_environment(environment)
        if spec.shows_images(environment.options):
            raise ConfigError(
                f"engine {config.engine.type} does not take images",
                got=f"environment {spec.name}, which shows images under its options",
                expected="engine=local (or, to evaluate, engine=openai)",
                hint="or let the environment show text",
            )


def _check_sampling(sampling: SamplingConfig) -> None:
    """Recorded log-probabilities are those of all tokens at the temperature; cut distributions would belie them."""
    wrong = {
        name: value for name, value in sampling.model_dump().items() if name != "temperature" and value != _WHOLE[name]
    }
    if sampling.temperature == 0:
        wrong["temperature"] = 0
    if wrong:
        raise ConfigError(
            "training samples from the policy's whole distribution",
            got=", ".join(f"sampling.{name} {value}" for name, value in wrong.items()),
            expected="a temperature above 0, and no top_p, top_k or min_p",
            hint="evaluations may sample otherwise: evaluation.sampling={temperature: 0}",
        )


def check_preferences(config: Config) -> None:
    """Check that a policy can learn from pairs as the config says.

    Raises:
        ConfigError: the loss does not learn from pairs, or not with these options, or adapters that do not fit.
    """
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


async def check_warm_start(config: Config) -> None:
    """Check that somebody can demonstrate, or that there is a file to learn from.

    Raises:
        ConfigError: a cluster is to be used, or a new model is to learn from a file.
        UsageError: there is no such file, or it holds something else; the environment has no expert, or the agent loop
            cannot be demonstrated.
    """
    refuse_cluster(config, "a warm start")
    check_adapters(config, may_drop_out=True)
    if config.sft.data is None:
        await check_experts(config)
        return
    read_chats(config.sft.data)
    if config.model.path == SCRATCH:
        raise ConfigError(
            "sft.data needs a model",
            got="model.path scratch, whose vocabulary is made from an environment's text",
            expected="a folder or a name",
            hint="set model.path, or --model",
        )


async def check_experts(config: Config) -> None:
    """Check that every environment has somebody who can demonstrate.

    Raises:
        UsageError: an environment has no expert, or its agent loop cannot be demonstrated.
    """
    for part in parts_of(config):
        spec = find_environment(part.config.sole_environment)
        if not await has_expert(spec, part.config):
            raise UsageError(
                f"environment {spec.name} has no expert to demonstrate",
                expected="an environment with an expert() method",
                hint="train from rewards alone: agentrl train, without algorithm.expert",
            )
        loop = build_loop(part.config.agent)
        if type(loop).demonstrate is AgentLoop.demonstrate:
            loop.demonstrate("")
