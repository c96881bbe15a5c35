"""Other processes of a training run: ranks, inference servers and environment nodes, on this machine or a cluster.

config.cluster, config.trainer.processes, config.engine ─► open_processes ─► RunProcesses(ranks, pool, nodes)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentrl.builders.adapter_checks import sends_adapters
from agentrl.builders.cluster import OnLoss, RunCluster, open_cluster, open_placed_pool
from agentrl.builders.environment_nodes import EnvironmentNodes, open_environment_nodes
from agentrl.builders.servers import ServedModel, open_pool
from agentrl.config.config import Config
from agentrl.config.derived import evaluation_engine_config
from agentrl.config.engines import ServerEngineConfig
from agentrl.errors.foreign import run_in_own_thread
from agentrl.models.load import accelerators, embedding_rows
from agentrl.observe.run_folder import RunDirectory
from agentrl.serving.engine_checks import add_reporting_flags
from agentrl.serving.launch.placement import trainer_gpus
from agentrl.serving.pool import ServerPool
from agentrl.training.distributed import Ranks
from agentrl.training.distributed.launch import RankProcesses, open_ranks

KEPT_MODEL = "engine-model"
"""Folder of a run with the model that its engines load after a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcesses:
    """Ranks, servers and environment nodes of a run."""

    ranks: Ranks
    pool: ServerPool | None
    """Pool of servers, or of engines on a cluster; ``None`` for an engine in this process."""
    nodes: EnvironmentNodes | None
    """Nodes of a cluster for environments; ``None`` to run them on this machine."""
    evaluation_pool: ServerPool | None
    """Pool of the servers of ``evaluation.engine``."""


@asynccontextmanager
async def open_processes(
    config: Config,
    folder: RunDirectory,
    *,
    model_path: str,
    base_path: str,
    version: int,
    say: Callable[[str], None],
    on_loss: OnLoss,
) -> AsyncIterator[RunProcesses]:
    """Start or join the processes of a run; started ones end with the block.

    The weights at `model_path` have the version `version`; the run started from `base_path`. `on_loss` is called, from
    any thread, when a process that the run needs is lost.

    Raises:
        ConfigError: the numbers of processes, servers and GPUs do not match.
        UsageError: no interpreter with the engine is found, there are too few GPUs, or the cluster cannot be reached.
        EngineError: a server does not start or does not answer.
        TrainingError: a rank does not start.
    """
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(open_cluster(config, folder.path, say=say))
        starter = partial(RankProcesses, cpus=config.trainer.cpus) if cluster is None else cluster.ranks
        count = config.trainer.processes
        ranks = stack.enter_context(open_ranks(count, logs=folder.logs, on_loss=on_loss, starter=starter))
        served = base_path if sends_adapters(config.engine) else model_path
        other, evaluation_pool = evaluation_engine_config(config), None
        if cluster or any(isinstance(part.engine, ServerEngineConfig) for part in (config, other) if part):
            served = await run_in_own_thread(keep_model, served, folder)
        pool = await _open_pool(stack, config, folder, served, version, cluster, say=say)
        if other is not None:
            evaluation_pool = await _open_pool(stack, other, folder, served, version, None, say=say)
        nodes = await stack.enter_async_context(open_environment_nodes(cluster, config, say=say))
        yield RunProcesses(ranks=ranks, pool=pool, evaluation_pool=evaluation_pool, nodes=nodes)


async def _open_pool(
    stack: AsyncExitStack,
    config: Config,
    folder: RunDirectory,
    model_path: str,
    version: int,
    cluster: RunCluster | None,
    *,
    say: Callable[[str], None],
) -> ServerPool | None:
    if not (isinstance(config.engine, ServerEngineConfig) or cluster):
        return None
    served = ServedModel(path=model_path, dtype=config.model.dtype, vocab_size=embedding_rows(model_path))
    if cluster is not None and cluster.places_engines:
        placed = open_placed_pool(cluster, served, version=version, say=say)
        return await stack.enter_async_context(placed)
    assert isinstance(config.engine, ServerEngineConfig)
    section = add_reporting_flags(config, config.engine)
    gpus = () if cluster else trainer_gpus(config, len(accelerators()))
    pool = open_pool(section, served, folder.path, version=version, trainer_gpus=gpus, say=say)
    return await stack.enter_async_context(pool)


def keep_model(path: str, folder: RunDirectory) -> str:
    """Return the path of a model that engines can load again at any time during the run.

    A model in a checkpoint, which a newer one will replace, is linked into the run's folder.
    """
    source, kept = Path(path), folder.path / KEPT_MODEL
    if folder.checkpoints not in source.parents:
        return path
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(source, kept, copy_function=_link)
    return str(kept)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copy2(source, target)
