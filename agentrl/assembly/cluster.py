"""The ranks and engines of a run on a cluster: what runs where, with what, and what has to be shared.

config.cluster ─► connection, room for all ─► ranks: RankActors, which run `agentrl.assembly.rank.serve`
                                            └► engines: `agentrl.assembly.placed_engines`
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.assembly.rank import serve
from agentrl.cluster import (
    Cluster,
    Place,
    RankActors,
    connect,
)
from agentrl.cluster.host import Holder, Setting, variables_set
from agentrl.cluster.interface import gloo_variables
from agentrl.config.cluster import ClusterConfig
from agentrl.config.engines import ServerEngineConfig
from agentrl.config.placement import HEAD, engine_bundles, rank_bundles
from agentrl.config.schema import Config
from agentrl.errors import TrainingError, UsageError
from agentrl.serving.launch.gpus import VARIABLE as VISIBLE
from agentrl.training.models.accelerators import use_gpu
from agentrl.training.ranks.processes import launched_ranks
from agentrl.weights.folder_transport import MEMORY
from agentrl.weights.process_group import address_towards

FOLDER_HINT = "put run.directory and model.path on a file system that all nodes see"
MEMORY_HINT = "set engine.transport=collective (or disk; for SGLang tensor): memory is shared on one machine only"
OnLoss = Callable[[TrainingError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCluster:
    """A run's part of a cluster."""

    cluster: Cluster
    config: Config
    folder: Path
    shared: Mapping[str, str]
    """Files and folders that ranks and engines must see, and what to do when they do not."""

    @property
    def places(self) -> dict[str, Place]:
        """Where ranks and engines are, by name."""
        return self.cluster.places

    @property
    def places_engines(self) -> bool:
        """Whether engines are started on it."""
        return any(name.startswith("server") for name in self.places)

    @property
    def host(self) -> str:
        """Address of this process, as nodes reach it."""
        if not self.cluster.is_from_outside:
            return self.cluster.own_node.address
        return address_towards(f"http://{next(iter(self.places.values())).node.address}")

    def setting(self, name: str, log: str, *, shared: Mapping[str, str]) -> Setting:
        """What the actor of that name needs to know."""
        place = self.places.get(name)
        # what has no GPU of its own must not take the first one of its node
        variables = {} if place is None or place.bundle.resources.get("GPU") else {VISIBLE: ""}
        key = getattr(self.config.engine, "api_key_variable", None)
        if key is not None and name.startswith("server") and key in os.environ:
            variables[key] = os.environ[key]
        return Setting(
            paths=[path or os.getcwd() for path in sys.path],
            log=self.folder / "logs" / f"{log}.log",
            variables=variables,
            shared=shared,
        )

    def ranks(self, count: int, *, logs: Path, on_loss: OnLoss) -> RankActors:
        """The ranks of the run, not started."""
        return RankActors(
            count,
            logs=logs,
            on_loss=on_loss,
            cluster=self.cluster,
            setting=lambda rank: self.setting(f"rank {rank}", f"rank-{rank}", shared=self.shared),
            work=serve,
            host=self.host,
        )


@asynccontextmanager
async def open_cluster(config: Config, folder: Path, *, say: Callable[[str], None]) -> AsyncIterator[RunCluster | None]:
    """The cluster of a run, with room for its ranks and engines; ``None`` where the config asks for none.

    Args:
        config: The run.
        folder: Its folder.
        say: Is told what a person should know.

    Raises:
        UsageError: no Ray, no cluster, no room.
        ConfigError: a cluster and a launcher of ranks.
    """
    section = config.cluster
    if section is None:
        yield None
        return
    check_sole_launcher()
    cluster = await _finished(asyncio.to_thread(_connect, config, section))
    try:
        placing = asyncio.create_task(asyncio.to_thread(_place, cluster, config, section, say))
        try:
            await asyncio.shield(placing)
        except asyncio.CancelledError:
            cluster.give_up()
            with suppress(UsageError):
                await placing
            raise
        for place in cluster.places.values():
            say(f"{place.name} is on {place.node}, with {place.bundle.in_words}")
        with _marked(folder) as mark, _marked_memory(config) as memory:
            run = RunCluster(cluster=cluster, config=config, folder=folder, shared={str(mark): FOLDER_HINT, **memory})
            with variables_set(gloo_variables(run.host)), _own_gpu(run):
                yield run
    finally:
        await asyncio.to_thread(cluster.close)


def check_sole_launcher() -> None:
    """Refuse a cluster for ranks that torchrun has started.

    Raises:
        UsageError: it has.
    """
    if launched_ranks():
        raise UsageError(
            "torchrun and a cluster both start ranks",
            got=f"{launched_ranks()} processes of torchrun, and the key cluster",
            expected="one of them",
            hint="run agentrl train without torchrun, or remove cluster",
        )


async def _finished(work: Any) -> Cluster:
    """What a thread opens; closed again when nobody wants it any more by then."""
    opening = asyncio.ensure_future(work)
    try:
        found: Cluster = await asyncio.shield(opening)
    except asyncio.CancelledError:
        with suppress(UsageError):
            (await opening).close()
        raise
    return found


def _connect(config: Config, section: ClusterConfig) -> Cluster:
    bundles = [*rank_bundles(config, section, gpus=False), *engine_bundles(config, section, gpus=False)]
    return connect(section, cpus=sum(bundle.resources.get("CPU", 0) for bundle in bundles))


def _place(cluster: Cluster, config: Config, section: ClusterConfig, say: Callable[[str], None]) -> None:
    gpus = cluster.has_gpus
    bundles = [*rank_bundles(config, section, gpus=gpus), *engine_bundles(config, section, gpus=gpus)]
    cluster.reserve(bundles, say=say)


@contextmanager
def _own_gpu(run: RunCluster) -> Iterator[None]:
    """Let this process compute on the GPU that Ray has put aside for rank 0, and on no other."""
    place = run.places.get(HEAD)
    if place is None or not place.bundle.resources.get("GPU"):
        yield
        return
    holder = run.cluster.actor(place, Holder, run.setting(HEAD, "rank-0", shared={}))  # keeps it until the end
    name = run.cluster.first_gpu(holder)
    visible = os.environ.get(VISIBLE)
    position = visible.split(",").index(name) if visible else int(name)
    use_gpu(position)
    with variables_set({"LOCAL_RANK": str(position), "LOCAL_WORLD_SIZE": "1"}):
        yield


@contextmanager
def _marked(folder: Path) -> Iterator[Path]:
    """A file that shows who sees the folder."""
    mark = folder / f".cluster-{secrets.token_hex(8)}"
    mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)


@contextmanager
def _marked_memory(config: Config) -> Iterator[dict[str, str]]:
    if not isinstance(config.engine, ServerEngineConfig) or config.engine.transport != "shared_memory":
        yield {}
        return
    with _marked(MEMORY) as mark:
        yield {str(mark): MEMORY_HINT}
