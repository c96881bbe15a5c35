"""The engine of a training run, and the weight sync that keeps it at the trainer's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from agentrl.builders.adapters import adapter_transport, sends_adapters
from agentrl.builders.checks import check_engine_reports
from agentrl.builders.servers import make_transport
from agentrl.builders.trainers import TrainerParts, load_policy
from agentrl.config.config import Config
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.engine import PolicyEngine
from agentrl.image import ImageReader
from agentrl.serving.local import LocalEngine
from agentrl.serving.pool import ServerPool
from agentrl.training.weights import ModelWeights, TrainedWeights
from agentrl.weights import TOLERANCE, CheckpointSource, InProcessSync, Probe, RemoteSync, WeightSync


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """An engine and what brings it new weights."""

    engine: PolicyEngine
    sync: WeightSync


def build_engine(
    config: Config,
    built: TrainerParts,
    pool: ServerPool | None,
    *,
    model_path: str,
    base_path: str | None,
    version: int,
    reader: ImageReader | None,
) -> EngineParts:
    """Connect an engine with a trainer: the pool, or one in this process that shares the trainer's weights if it can.

    Args:
        config: The run.
        built: Trainer and weights.
        pool: The engine, where the config asks for servers, or for engines on a cluster.
        model_path: Weights to start from.
        base_path: The model that a checkpoint's adapter belongs to.
        version: Version of the weights at `model_path`.
        reader: Prepares images.

    Raises:
        ConfigError: the engine does not report what the trainer needs.
    """
    model = built.trainer.model
    probe = Probe.random(model.config.get_text_config().vocab_size, tolerance=TOLERANCE[config.model.dtype])
    if pool is not None:
        parts = EngineParts(engine=pool, sync=_remote_sync(config, built.source, pool, probe))
    else:

        def load() -> PreTrainedModel:
            return load_policy(config, model_path, base_path=base_path)

        parts = _local_engine(config, built, load, probe, version=version, reader=reader)
    check_engine_reports(config, parts.engine)
    return parts


def _local_engine(
    config: Config,
    built: TrainerParts,
    load: Callable[[], PreTrainedModel],
    probe: Probe,
    *,
    version: int,
    reader: ImageReader | None,
) -> EngineParts:
    assert isinstance(config.engine, LocalEngineConfig), "an engine of servers needs its pool"
    trainer, source = built.trainer, built.source
    shared = config.rollout.max_staleness == 0 and not trainer.ranks.are_many
    model = trainer.model
    if not shared:
        model = load() if trainer.ranks.are_many else copy.deepcopy(trainer.model)
    engine = LocalEngine(
        model, config.engine, version=version, reader=reader, routed_experts=config.trainer.router_replay
    )
    few = config.model.lora is not None  # the frozen weights are there already
    sync = InProcessSync(TrainedWeights(source) if few else source, engine, shared=shared, probe=probe)
    return EngineParts(engine=engine, sync=sync)


def _remote_sync(config: Config, source: ModelWeights, pool: ServerPool, probe: Probe) -> RemoteSync:
    settings, folder = config.engine, Path(config.run.directory)
    assert isinstance(settings, LocalEngineConfig | ServerEngineConfig)
    if sends_adapters(settings):
        return RemoteSync(TrainedWeights(source), pool.group, adapter_transport(settings, folder, source), probe)
    transport = make_transport(settings, folder)
    if isinstance(settings, LocalEngineConfig):
        return RemoteSync(source, pool.group, transport, probe)
    return RemoteSync(CheckpointSource(source, source.model), pool.group, transport, probe, sleeps=settings.sleep)
