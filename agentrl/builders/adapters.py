"""Adapters that are sent to servers alone; the servers keep the base weights."""

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
    """Check whether servers are sent adapters alone."""
    return isinstance(engine, ServerEngineConfig) and engine.adapter_rank is not None


def adapter_transport(
    section: ServerEngineConfig | LocalEngineConfig, shared_folder: Path, source: ModelWeights
) -> AdapterTransport:
    """Make the transport by which the adapters of a model reach the servers of a config that `sends_adapters`.

    Args:
        section: Which servers.
        shared_folder: Where they are written that go by disk.
        source: The model's.
    """
    goes_by_disk = isinstance(section, ServerEngineConfig) and section.transport == "disk"
    return AdapterTransport(shared_folder if goes_by_disk else memory_folder(), partial(save_adapter, source.model))


def check_adapter_sync(config: Config) -> None:
    """Check that what is trained fits into what servers are sent.

    Raises:
        ConfigError: no adapters, ones of a greater rank, or more than adapters.
    """
    engine, lora = config.engine, config.model.lora
    if not isinstance(engine, ServerEngineConfig) or engine.adapter_rank is None:
        return
    if lora is None:
        raise ConfigError(
            "engine.adapter_rank sends adapters, and all weights are trained",
            got="no model.lora",
            expected="model.lora, or no engine.adapter_rank",
        )
    if lora.rank > engine.adapter_rank:
        raise ConfigError(
            "the adapters are larger than what the servers take",
            got=f"model.lora.rank {lora.rank} with engine.adapter_rank {engine.adapter_rank}",
            expected=f"engine.adapter_rank={lora.rank}, or more",
        )
    if lora.modules_to_save:
        raise ConfigError(
            "engine.adapter_rank sends adapters only, and modules are trained whole",
            got=f"model.lora.modules_to_save {lora.modules_to_save}",
            expected="no model.lora.modules_to_save, or no engine.adapter_rank",
        )
    if lora.quantize is not None:
        raise ConfigError(
            "engine.adapter_rank leaves servers the weights that they have, and the trainer's are rounded to 4 bits",
            got=f"model.lora.quantize {lora.quantize}",
            expected="no engine.adapter_rank: merged weights are those that the trainer computes with",
        )
