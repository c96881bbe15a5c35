"""Whether adapters can be trained as a config says."""

from __future__ import annotations

from agentrl.config.schema import Config
from agentrl.errors import ConfigError
from agentrl.training.models.lora import PEFT


def check_adapters(config: Config, *, may_drop_out: bool = False) -> None:
    """Check that adapters can be made, before anything else is.

    Args:
        config: Of a run that trains its model.
        may_drop_out: Whether no two forward passes have to agree.

    Raises:
        ConfigError: they have dropout where two forward passes or ranks must agree or in several lanes,
            ``trainer.tensor_parallel`` cannot cut them, or 4 bits are to be in shards.
        UsageError: the extra is not installed.
    """
    lora, trainer = config.model.lora, config.trainer
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
    if lora.dropout and trainer.lanes > 1:
        raise ConfigError(
            "model.lora.dropout draws from one generator, which lanes would take from each other",
            got=f"model.lora.dropout {lora.dropout:g} with trainer.lanes {trainer.lanes}",
            expected="trainer.lanes=1, or no dropout",
        )
    if lora.dropout and trainer.tensor_parallel > 1:
        raise ConfigError(
            "model.lora.dropout draws other numbers in ranks that compute the same tokens",
            got=f"model.lora.dropout {lora.dropout:g} with trainer.tensor_parallel {trainer.tensor_parallel}",
            expected="trainer.tensor_parallel=1, or no dropout",
        )
    if lora.rank % trainer.tensor_parallel:
        raise ConfigError(
            "trainer.tensor_parallel cannot cut the adapters evenly",
            got=f"model.lora.rank {lora.rank}, {trainer.tensor_parallel} ranks",
            expected="a rank that is a multiple of trainer.tensor_parallel",
        )
    if lora.quantize is not None and trainer.processes > 1:
        raise ConfigError(
            "weights in 4 bits cannot be in shards",
            got=f"model.lora.quantize {lora.quantize} with {trainer.processes} processes",
            expected="trainer.processes=1",
            hint="leave model.lora.quantize out: every process holds a part of the weights only",
        )


def refuse_adapters(config: Config, what: str) -> None:
    """Refuse adapters where none are made.

    Raises:
        ConfigError: the config has ``model.lora``.
    """
    if config.model.lora is not None:
        raise ConfigError(
            f"{what} trains all weights", got="model.lora", expected="no model.lora", hint="set model.lora=null"
        )
