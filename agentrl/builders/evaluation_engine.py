"""Checks of ``evaluation.engine``, the engine of evaluations that run during asynchronous training."""

from __future__ import annotations

from agentrl.config.config import Config
from agentrl.config.derived import evaluation_engine_config
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.errors import ConfigError
from agentrl.serving.engine_checks import check_images


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
        raise ConfigError("evaluation.engine has no use", got="evaluation.every 0", expected="evaluation.every=N")
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
