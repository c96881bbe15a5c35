"""What only one kind of run asks of a config, checked before the run's folder is made."""

from __future__ import annotations

from agentrl.agent_loop import AgentLoop
from agentrl.assembly.chat_file import read_chats
from agentrl.assembly.environments import find_environment
from agentrl.assembly.episodes import build_loop
from agentrl.assembly.models import SCRATCH
from agentrl.assembly.scratch import has_expert
from agentrl.config.engines import LocalEngineConfig, OpenAIEngineConfig, ServerEngineConfig
from agentrl.config.parts import parts_of
from agentrl.config.schema import Config, SamplingConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.training.lora import PEFT
from agentrl.training.objective import Objective
from agentrl.training.rewards import RewardShaping

_WHOLE = SamplingConfig().model_dump()


def check_training(config: Config) -> LocalEngineConfig | ServerEngineConfig:
    """Check that a policy can be trained as the config says.

    Returns:
        The engine's settings.

    Raises:
        ConfigError: an engine that takes no weights, or no images where the environment shows some, sampling from
            another distribution than the policy's own, or options that the algorithm does not take.
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
    _check_sampling(config.sampling)
    _check_adapters(config)
    Objective(config.algorithm)
    RewardShaping(config.algorithm.shaping, max_tokens=config.agent.max_tokens)
    return config.engine


def _check_adapters(config: Config, *, may_drop_out: bool = False) -> None:
    """Check that adapters can be made, before anything else is.

    Raises:
        ConfigError: they have dropout where two forward passes must agree.
        UsageError: the extra is not installed.
    """
    lora = config.model.lora
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


async def check_warm_start(config: Config) -> None:
    """Check that somebody can demonstrate, or that there is a file to learn from.

    Raises:
        ConfigError: several processes are to train, or a new model is to learn from a file.
        UsageError: there is no such file, or it holds something else; the environment has no expert, or the agent loop
            cannot be demonstrated.
    """
    if config.trainer.processes > 1:
        raise ConfigError(
            "a warm start trains in one process",
            got=f"trainer.processes {config.trainer.processes}",
            expected="1",
            hint="set trainer.processes=1 for agentrl sft; agentrl train may have more",
        )
    _check_adapters(config, may_drop_out=True)
    if config.sft.data is not None:
        read_chats(config.sft.data)
        if config.model.path == SCRATCH:
            raise ConfigError(
                "sft.data needs a model",
                got="model.path scratch, whose vocabulary is made from an environment's text",
                expected="a folder or a name",
                hint="set model.path, or --model",
            )
        return
    for part in parts_of(config):
        spec = find_environment(part.config.sole_environment)
        if not await has_expert(spec, part.config):
            raise UsageError(
                f"environment {spec.name} has no expert to demonstrate",
                expected="an environment with an expert() method",
                hint="train from rewards instead: agentrl train",
            )
        loop = build_loop(part.config.agent)
        if type(loop).demonstrate is AgentLoop.demonstrate:
            loop.demonstrate("")
