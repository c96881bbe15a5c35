"""Router replay needs an engine that tells which experts tokens went to."""

from __future__ import annotations

import os

from agentrl.config.engines import ServerEngineConfig
from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.policy import PolicyEngine
from agentrl.serving.launch import usable_gpus
from agentrl.serving.launch.command import RETURN_ROUTES


def told_experts(config: Config, section: ServerEngineConfig) -> ServerEngineConfig:
    """The engine's section, whose launched servers tell experts where the trainer replays routes.

    Raises:
        ConfigError: they would run on the CPU, where neither vLLM nor SGLang can.
    """
    if not config.trainer.router_replay or section.servers != "launch":
        return section
    if not usable_gpus(os.environ):
        raise ConfigError(
            "trainer.mixture.replay needs servers that tell experts, which vLLM and SGLang do on GPUs only",
            got=f"engine {config.engine.type} without a GPU",
            hint="set engine=local, or trainer.mixture.replay=false",
        )
    if RETURN_ROUTES in section.arguments:
        return section
    return section.model_copy(update={"arguments": [*section.arguments, RETURN_ROUTES]})


def check_tells_experts(config: Config, engine: PolicyEngine) -> None:
    """Refuse an engine whose routes the trainer would wait for in vain.

    Raises:
        ConfigError: it tells none.
    """
    if config.trainer.router_replay and not engine.capabilities.routes:
        raise ConfigError(
            "trainer.mixture.replay needs an engine that tells which experts tokens went to",
            got=f"engine {config.engine.type}, which does not",
            expected=f"engine=local, or servers that were started with {RETURN_ROUTES}",
            hint="add it to engine.arguments, or set trainer.mixture.replay=false",
        )
