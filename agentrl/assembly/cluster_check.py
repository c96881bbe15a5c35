"""What a cluster asks of a config, checked before the run's folder is made."""

from __future__ import annotations

from agentrl.cluster.connection import RAY
from agentrl.config.cluster import ClusterConfig
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.config.schema import Config
from agentrl.errors import ConfigError, UsageError

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
        config: Of what runs.
        what: How it is called.

    Raises:
        ConfigError: the config asks for one.
    """
    if config.cluster is not None:
        raise ConfigError(f"{what} runs on this machine", got="the key cluster", hint="remove it: cluster=null")
