"""Weight sync that sends only adapters to servers, which keep the base weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from agentrl.config.config import Config
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.errors import ConfigError
from agentrl.models.lora import save_adapter
from agentrl.training.weights import ModelWeights
from agentrl.weights import AdapterTransport, memory_folder


def sends_adapters(engine: object) -> bool:
    """Return True if weight sync sends only adapters."""
    return isinstance(engine, ServerEngineConfig) and engine.adapter_rank is not None


def adapter_transport(
    section: ServerEngineConfig | LocalEngineConfig, shared_folder: Path, source: ModelWeights
) -> AdapterTransport:
    """Make the transport for the adapters of a model.

    Args:
        section: Engine section of the config.
        shared_folder: Folder for adapters that are sent through the disk.
        source: Weights of the model.
    """
    goes_by_disk = isinstance(section, ServerEngineConfig) and section.transport == "disk"
    return AdapterTransport(shared_folder if goes_by_disk else memory_folder(), partial(save_adapter, source.model))


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
