"""One adapter of a run (``model.lora``): checks, and weight sync that sends only the adapter to servers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from agentrl.config.config import Config
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.errors import ConfigError
from agentrl.models.lora import PEFT, save_adapter
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


def check_adapters(config: Config, *, allows_dropout: bool = False) -> None:
    """Check that the run's adapters can be created.

    Args:
        config: Config of a run that trains its model.
        allows_dropout: True if no two forward passes have to agree.

    Raises:
        ConfigError: dropout where two forward passes or ranks must agree, or with several threads; a rank that
            ``trainer.tensor_parallel`` cannot divide; or sharded 4-bit weights.
        UsageError: the extra ``lora`` is not installed.
    """
    lora, trainer = config.model.lora, config.trainer
    if lora is None:
        return
    PEFT.load()
    if lora.dropout and not allows_dropout:
        raise ConfigError(
            "model.lora.dropout works with agentrl sft only",
            got=lora.dropout,
            expected="0: two forward passes over the same tokens must give the same log-probabilities",
            hint="remove it; agentrl sft supports it",
        )
    if lora.dropout and trainer.lanes > 1:
        raise ConfigError(
            "model.lora.dropout draws from one random generator, which threads cannot share reproducibly",
            got=f"model.lora.dropout {lora.dropout:g} with trainer.lanes {trainer.lanes}",
            expected="trainer.lanes=1, or no dropout",
        )
    if lora.dropout and trainer.tensor_parallel > 1:
        raise ConfigError(
            "model.lora.dropout draws different numbers in ranks that compute the same tokens",
            got=f"model.lora.dropout {lora.dropout:g} with trainer.tensor_parallel {trainer.tensor_parallel}",
            expected="trainer.tensor_parallel=1, or no dropout",
        )
    if lora.rank % trainer.tensor_parallel:
        raise ConfigError(
            "trainer.tensor_parallel cannot split the adapters evenly",
            got=f"model.lora.rank {lora.rank}, {trainer.tensor_parallel} ranks",
            expected="a rank that is a multiple of trainer.tensor_parallel",
        )
    if lora.quantize is not None and trainer.processes > 1:
        raise ConfigError(
            "4-bit weights cannot be sharded",
            got=f"model.lora.quantize {lora.quantize} with {trainer.processes} processes",
            expected="trainer.processes=1",
            hint="remove model.lora.quantize: with several processes, each holds only a part of the weights",
        )


def refuse_adapters(config: Config, what: str) -> None:
    """Check that a run that trains all weights has no adapters.

    Raises:
        ConfigError: the config has ``model.lora``.
    """
    if config.model.lora is not None:
        raise ConfigError(
            f"{what} trains all weights", got="model.lora", expected="no model.lora", hint="set model.lora=null"
        )
