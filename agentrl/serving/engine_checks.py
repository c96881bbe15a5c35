"""Checks that an engine accepts the requests of a run, and reports everything that the trainer needs."""

from __future__ import annotations

import os

from agentrl.config.config import Config
from agentrl.config.derived import per_environment_configs
from agentrl.config.engines import LocalEngineConfig, OpenAIEngineConfig, ServerEngineConfig, VLLMEngineConfig
from agentrl.engine import PolicyEngine
from agentrl.env.lookup import resolve_environment
from agentrl.errors import ConfigError
from agentrl.serving.launch import usable_gpus
from agentrl.serving.launch.process import RETURN_ROUTES


def add_reporting_flags(config: Config, section: ServerEngineConfig) -> ServerEngineConfig:
    """Return the engine section with the arguments that make launched servers report everything that the trainer needs.

    Raises:
        ConfigError: routed experts are needed, which vLLM and SGLang cannot report on a CPU.
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
    """Check that the engine reports the routed experts of each token if the trainer replays them.

    Raises:
        ConfigError: the engine does not report them.
    """
    if config.trainer.router_replay and not engine.capabilities.routed_experts:
        raise ConfigError(
            "trainer.moe.router_replay needs an engine that reports the routed experts of each token",
            got=f"engine {config.engine.type}, which does not",
            expected=f"engine=local, or servers started with {RETURN_ROUTES}",
            hint="add the option to engine.arguments, or set trainer.moe.router_replay=false",
        )


def check_images(config: Config) -> None:
    """Check that the engine accepts images if an environment shows any.

    Raises:
        ConfigError: the engine does not accept images.
    """
    if isinstance(config.engine, LocalEngineConfig | OpenAIEngineConfig | VLLMEngineConfig):
        return
    for environment in (part.config.sole_environment for part in per_environment_configs(config)):
        spec = resolve_environment(environment.name)
        if spec.shows_images(environment.options):
            raise ConfigError(
                f"engine {config.engine.type} does not accept images",
                got=f"environment {spec.name}, which shows images under its options",
                expected="engine=local or engine=vllm (or, to evaluate, engine=openai)",
                hint="or let the environment show text",
            )
