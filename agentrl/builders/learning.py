"""Trainer of a run, its weights, and the engine that samples with them."""

from __future__ import annotations

import copy
from pathlib import Path

from agentrl.builders.adapters import adapter_transport, sends_adapters
from agentrl.builders.servers import make_transport
from agentrl.builders.trainers import LearningParts, build_on_ranks, build_trainer, load_policy
from agentrl.config.config import Config
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.engine import PolicyEngine
from agentrl.render.renderer import Renderer
from agentrl.serving.engine_checks import check_engine_reports
from agentrl.serving.local import LocalEngine
from agentrl.serving.pool import ServerPool
from agentrl.training.distributed import Ranks
from agentrl.training.weights import ModelWeights, TrainedWeights
from agentrl.weights import TOLERANCE, CheckpointSource, InProcessSync, Probe, RemoteSync, WeightSync


def build_learning(
    config: Config,
    ranks: Ranks,
    pool: ServerPool | None,
    *,
    model_path: str,
    base_path: str | None,
    version: int,
    renderer: Renderer,
) -> LearningParts:
    """Build the trainer of one model on all ranks, and connect an engine to it.

    The engine is the pool, or a local engine, which shares the trainer's weights if possible.

    Args:
        config: Config of the run.
        ranks: Ranks that train together.
        pool: Engine, if the config uses servers or engines on a cluster.
        model_path: Initial weights.
        base_path: Model that the run started from, if the weights are from a checkpoint: the reference of the KL
            penalty, and the base of an adapter.
        version: Version of the weights at `model_path`.
        renderer: Renderer that decodes tokens and prepares images.

    Raises:
        ConfigError: the algorithm's options are invalid, or the engine does not report what the trainer needs.
        UsageError: a model does not exist.
    """
    built = build_on_ranks(ranks, build_trainer, config, model_path, base_path)
    trainer, source = built.trainer, built.source
    size = trainer.model.config.get_text_config().vocab_size
    probe = Probe.random(size, **TOLERANCE[config.model.dtype])
    engine: PolicyEngine
    sync: WeightSync
    if pool is not None:
        engine, sync = pool, _remote_sync(config, source, pool, probe)
    else:
        assert isinstance(config.engine, LocalEngineConfig), "an engine with servers needs a pool"
        shared = config.rollout.is_synchronous and not trainer.ranks.is_distributed
        model = trainer.model
        if trainer.ranks.is_distributed:
            model = load_policy(config, model_path, base_path=base_path)
        elif not shared:
            model = copy.deepcopy(model)
        engine = LocalEngine(
            model,
            config.engine,
            version=version,
            reader=renderer.images,
            decode=renderer.encoder.decode,
            routed_experts=config.trainer.router_replay,
        )
        sent = source if config.model.lora is None else TrainedWeights(source)  # the engine has the frozen weights
        sync = InProcessSync(sent, engine, shared=shared, probe=probe)
    check_engine_reports(config, engine)
    return LearningParts(trainer=trainer, source=source, engine=engine, sync=sync)


def _remote_sync(config: Config, source: ModelWeights, pool: ServerPool, probe: Probe) -> RemoteSync:
    settings, folder = config.engine, Path(config.run.directory)
    assert isinstance(settings, LocalEngineConfig | ServerEngineConfig)
    if sends_adapters(settings):
        return RemoteSync(TrainedWeights(source), pool.group, adapter_transport(settings, folder, source), probe)
    transport = make_transport(settings, folder)
    if isinstance(settings, LocalEngineConfig):
        return RemoteSync(source, pool.group, transport, probe)
    return RemoteSync(CheckpointSource(source, source.model), pool.group, transport, probe, sleeps=settings.sleep)
