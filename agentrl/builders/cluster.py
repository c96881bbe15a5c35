"""Ranks and engines of a run on a cluster: placement, settings, and files that they share.

config.cluster ─► connection, reservation ─► ranks: RankActors, which run `agentrl.builders.workers.serve`
                                           └► engines: one actor each, with a launcher of servers or a local engine
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.builders.models import load_images
from agentrl.builders.ray import (
    MAX_CALLS,
    RAY,
    ActorEnvironment,
    ActorServer,
    Cluster,
    ClusterPlace,
    GpuReservation,
    LocalEngineActor,
    PlacedActor,
    RankActors,
    ServerActor,
    answer_of,
    connect,
    gloo_variables,
    set_variables,
)
from agentrl.builders.servers import SERVED_MODEL, ServedModel, make_launcher, make_server, untie_embeddings
from agentrl.builders.workers import serve
from agentrl.config.cluster import ClusterConfig
from agentrl.config.config import Config
from agentrl.config.derived import HEAD, engine_bundles, environment_bundles, rank_bundles
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.engine import InferenceServer, ServerLost
from agentrl.errors import ConfigError, EngineError, TrainingError, UsageError
from agentrl.errors.foreign import run_in_own_thread
from agentrl.models.load import load_model, use_gpu
from agentrl.render.chat_template import TextEncoder
from agentrl.render.tokenizers import load_tokenizer
from agentrl.serving.launch import Launcher
from agentrl.serving.launch.resources import VISIBLE_GPUS as VISIBLE
from agentrl.serving.local import LocalEngine
from agentrl.serving.pool import PoolSettings, ServerPool
from agentrl.training.distributed.launch import launched_ranks
from agentrl.weights import MEMORY, address_towards

FOLDER_HINT = "put run.directory and model.path on a file system that is mounted on all nodes"
MEMORY_HINT = "set engine.transport=collective, disk, or (SGLang) tensor: shared memory works on one machine only"
ACTOR_CLOSE_S = 10.0
"""Seconds before an actor that does not end its server is killed; the server's guard then ends the server."""
ACTOR_PING_S = 30.0
"""Seconds for the actor of a lost server to answer before it is replaced; its process may be suspended."""
START_MARGIN_S = 60.0
"""Seconds in addition to ``engine.start_timeout_s`` before the start of a server's actor fails."""
OnLoss = Callable[[TrainingError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCluster:
    """Cluster of a run, with the run's placed ranks and engines."""

    cluster: Cluster
    config: Config
    folder: Path
    shared: Mapping[str, str]
    """Files and folders that every node must see, each with the hint of the error if one does not."""

    @property
    def places(self) -> dict[str, ClusterPlace]:
        """Places of ranks and engines, by name."""
        return self.cluster.places

    @property
    def places_engines(self) -> bool:
        """True if engines are started on the cluster."""
        return any(name.startswith("server") for name in self.places)

    @property
    def host(self) -> str:
        """Address of this process for the nodes."""
        if not self.cluster.is_from_outside:
            return self.cluster.own_node.address
        return address_towards(f"http://{next(iter(self.places.values())).node.address}")

    def setting(self, name: str, log: str, *, shared: Mapping[str, str]) -> ActorEnvironment:
        """Return the environment of an actor."""
        place = self.places.get(name)
        # an actor without a GPU must not use the first one of its node
        variables = {} if place is None or place.bundle.resources.get("GPU") else {VISIBLE: ""}
        key = getattr(self.config.engine, "api_key_variable", None)
        if key is not None and name.startswith("server") and key in os.environ:
            variables[key] = os.environ[key]
        return ActorEnvironment(
            paths=[path or os.getcwd() for path in sys.path],
            log=self.folder / "logs" / f"{log}.log",
            variables=variables,
            shared=shared,
        )

    def ranks(self, count: int, *, logs: Path, on_loss: OnLoss) -> RankActors:
        """Make the ranks of the run, without starting them."""
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
    """Connect to a run's cluster and reserve the resources of its ranks and engines; ``None`` without a cluster.

    Raises:
        UsageError: Ray is not installed, the cluster cannot be reached or is too small, or torchrun started this
            process.
    """
    section = config.cluster
    if section is None:
        yield None
        return
    check_sole_launcher()
    cluster = await _open_in_thread(run_in_own_thread(_connect, config, section))
    try:
        placing = asyncio.create_task(run_in_own_thread(_place, cluster, config, section, say))
        try:
            await asyncio.shield(placing)
        except asyncio.CancelledError:
            cluster.give_up()
            with suppress(UsageError):
                await placing
            raise
        for place in cluster.places.values():
            say(f"{place.name} is on {place.node}, with {place.bundle.in_words}")
        with _mark_file(folder) as mark, _mark_memory(config) as memory:
            run = RunCluster(cluster=cluster, config=config, folder=folder, shared={str(mark): FOLDER_HINT, **memory})
            with set_variables(gloo_variables(run.host)), _own_gpu(run):
                yield run
    finally:
        await run_in_own_thread(cluster.close)


def check_sole_launcher() -> None:
    """Check that torchrun has not started the ranks of a run on a cluster.

    Raises:
        UsageError: torchrun has started this process.
    """
    if launched_ranks():
        raise UsageError(
            "torchrun and a cluster both start ranks",
            got=f"{launched_ranks()} processes of torchrun, and the key cluster",
            expected="either torchrun or cluster",
            hint="run agentrl train without torchrun, or remove cluster",
        )


async def _open_in_thread(work: Coroutine[Any, Any, Cluster]) -> Cluster:
    """Open a cluster in a thread; it is closed again if the caller is cancelled in the meantime."""
    opening = asyncio.create_task(work)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        with suppress(UsageError):
            (await opening).close()
        raise


def _connect(config: Config, section: ClusterConfig) -> Cluster:
    bundles = [
        *rank_bundles(config, section, gpus=False),
        *engine_bundles(config, section, gpus=False),
        *environment_bundles(section),
    ]
    return connect(section, cpus=sum(bundle.resources.get("CPU", 0) for bundle in bundles))


def _place(cluster: Cluster, config: Config, section: ClusterConfig, say: Callable[[str], None]) -> None:
    gpus = cluster.has_gpus
    bundles = [*rank_bundles(config, section, gpus=gpus), *engine_bundles(config, section, gpus=gpus)]
    cluster.reserve(bundles, strategy=section.strategy, say=say)
    cluster.reserve(environment_bundles(section), strategy="spread", say=say)


@contextmanager
def _own_gpu(run: RunCluster) -> Iterator[None]:
    """Restrict this process to the GPU that Ray has reserved for rank 0."""
    place = run.places.get(HEAD)
    if place is None or not place.bundle.resources.get("GPU"):
        yield
        return
    # the actor holds the GPU until the run ends
    holder = run.cluster.actor(place, GpuReservation, run.setting(HEAD, "rank-0", shared={}))
    name = run.cluster.first_gpu(holder)
    visible = os.environ.get(VISIBLE)
    position = visible.split(",").index(name) if visible else int(name)
    use_gpu(position)
    with set_variables({"LOCAL_RANK": str(position), "LOCAL_WORLD_SIZE": "1"}):
        yield


@contextmanager
def _mark_file(folder: Path) -> Iterator[Path]:
    """Create a marker file, by which nodes check that they see the folder."""
    mark = folder / f".cluster-{secrets.token_hex(8)}"
    mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)


@contextmanager
def _mark_memory(config: Config) -> Iterator[dict[str, str]]:
    if not isinstance(config.engine, ServerEngineConfig) or config.engine.transport != "shared_memory":
        yield {}
        return
    with _mark_file(MEMORY) as mark:
        yield {str(mark): MEMORY_HINT}


@asynccontextmanager
async def open_placed_pool(
    run: RunCluster, model: ServedModel, *, version: int, say: Callable[[str], None]
) -> AsyncIterator[ServerPool]:
    """Start the engines of a run on its cluster; they end with the block. The first sync will send `version`.

    An engine whose actor or node is lost starts again on a node with its resources; `say` gets messages about it.

    Raises:
        UsageError: a node has no interpreter with the engine, or does not see a shared file or folder.
        EngineError: a server does not start.
    """
    engines = _PlacedEngines(run, model, say)
    try:
        servers, settings = await engines.start()
        async with AsyncExitStack() as stack:
            pool = ServerPool(servers, settings, restart=engines.restart, version=version, say=say)
            stack.push_async_callback(pool.close)
            await pool.start()
            yield pool
    finally:
        await engines.close()


class _PlacedEngines:
    """Actors of a run's engines."""

    def __init__(self, run: RunCluster, model: ServedModel, say: Callable[[str], None]) -> None:
        self._run, self._model, self._say = run, model, say
        self._cluster, self._engine = run.cluster, run.config.engine
        self._shared: dict[str, str] = {}
        self.actors: list[PlacedActor] = []

    async def start(self) -> tuple[list[InferenceServer], PoolSettings]:
        """Start all engines; launched servers are ready when this returns."""
        if isinstance(self._engine, ServerEngineConfig):
            served = await run_in_own_thread(
                untie_embeddings, self._model.path, self._run.folder / SERVED_MODEL, dtype=self._model.dtype
            )
            self._model = replace(self._model, path=str(served))
        self._shared = {**self._run.shared, **_folder_of(self._model)}
        places = [place for name, place in self._run.places.items() if name.startswith("server")]
        self.actors = [PlacedActor(self._cluster, place, self._make_actor) for place in places]
        for actor in self.actors:
            await run_in_own_thread(actor.check, self._shared)
        started = await asyncio.gather(*map(self._serve, self.actors))
        return list(started), self._settings

    def _make_actor(self, place: ClusterPlace) -> Any:
        log = place.name if isinstance(self._engine, LocalEngineConfig) else f"{place.name}-actor"
        setting = self._run.setting(place.name, log, shared=self._shared)
        return self._cluster.actor(place, self._kind, setting, self._make(place), calls=MAX_CALLS)

    @property
    def _kind(self) -> type:
        return LocalEngineActor if isinstance(self._engine, LocalEngineConfig) else ServerActor

    @property
    def _settings(self) -> PoolSettings:
        if isinstance(self._engine, ServerEngineConfig):
            return PoolSettings.from_config(self._engine)
        assert isinstance(self._engine, LocalEngineConfig)
        section = self._run.cluster.section
        return PoolSettings(
            concurrency=self._engine.max_num_seqs,
            max_concurrency=2 * self._engine.max_num_seqs,
            connect_timeout_s=section.timeout_s,
        )

    def _make(self, place: ClusterPlace) -> Callable[[], Launcher | LocalEngine]:
        model = self._model
        if isinstance(self._engine, LocalEngineConfig):
            return partial(make_engine, self._engine, model, device=self._run.config.model.device)
        assert isinstance(self._engine, ServerEngineConfig)
        one = self._engine.model_copy(update={"replicas": 1, "gpus": None})
        return partial(
            make_launcher,
            one,
            model.path,
            self._run.folder,
            dtype=model.dtype,
            say=print,
            host=place.node.address,
            names=[place.name],
        )

    async def _serve(self, actor: PlacedActor) -> InferenceServer:
        if isinstance(self._engine, LocalEngineConfig):
            return ActorServer(self._cluster, actor.handle, actor.place)
        assert isinstance(self._engine, ServerEngineConfig)
        deadline_s = self._engine.start_timeout_s + START_MARGIN_S
        url = await answer_of(self._cluster, actor.handle.start.remote(), actor.name, deadline_s=deadline_s)
        return make_server(self._engine, url, self._model.vocab_size)

    async def restart(self, index: int) -> InferenceServer:
        """Restart the server of an actor; replace the actor if it is lost.

        Raises:
            EngineError: the actor or its server does not start.
            UsageError: no node has the resources of the actor.
        """
        actor = self.actors[index]
        patience_s = min(ACTOR_PING_S, self._settings.connect_timeout_s / 2)  # the pool retries after connect_timeout_s
        try:
            await answer_of(self._cluster, actor.handle.ping.remote(), actor.name, deadline_s=patience_s)
        except ServerLost as error:
            loss = self._cluster.loss(actor.place, actor.name, error.__cause__ or error, kind=EngineError)
            self._say(f"{loss}. It is being restarted")
            await run_in_own_thread(actor.start_again, self._shared)
            self._say(f"{actor.name} is on {actor.place.node} now")
        server = await self._serve(actor)
        await server.connect(deadline_s=self._settings.connect_timeout_s)
        return server

    async def close(self) -> None:
        """End the servers and the actors; an actor that does not answer is killed."""
        closing = [
            answer_of(self._cluster, actor.handle.close.remote(), actor.name, deadline_s=ACTOR_CLOSE_S)
            for actor in self.actors
        ]
        await asyncio.gather(*closing, return_exceptions=True)
        for actor in self.actors:
            self._cluster.kill(actor.handle)
        self.actors = []


def _folder_of(model: ServedModel) -> dict[str, str]:
    """Return the model folder that every node must see; empty for a model on the hub."""
    return {str(Path(model.path).absolute()): FOLDER_HINT} if Path(model.path).is_dir() else {}


def make_engine(section: LocalEngineConfig, model: ServedModel, *, device: str) -> LocalEngine:
    """Make a local engine with its own copy of the model, in the calling process."""
    loaded = load_model(model.path, dtype=model.dtype, device=device)
    decode = TextEncoder(load_tokenizer(model.path)).decode
    return LocalEngine(loaded, section, reader=load_images(model.path), decode=decode)


SINGLE_GPU = "cuda:"


def check_cluster(config: Config) -> None:
    """Check that a run can be placed on its cluster.

    Raises:
        ConfigError: a key that has no effect, or does not work, on a cluster.
        UsageError: Ray is not installed.
    """
    section = config.cluster
    if section is None:
        return
    if config.model.device.startswith(SINGLE_GPU):
        raise ConfigError(
            "model.device names a GPU, but the cluster assigns GPUs",
            got=config.model.device,
            expected="auto, cpu or cuda",
        )
    engine = config.engine
    if isinstance(engine, ServerEngineConfig):
        _check_servers(engine, section)
    launches = isinstance(engine, LocalEngineConfig) or getattr(engine, "servers", None) == "launch"
    if section.engine is not None and not launches:
        raise ConfigError(
            "cluster.engine is ignored if engine.servers has addresses", hint="remove cluster.engine or engine.servers"
        )
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
            "engine.transport cuda_ipc needs servers on the trainer's GPU",
            got="a cluster, which assigns separate GPUs",
            expected="collective, disk, tensor (SGLang), or shared_memory on one machine",
        )
    if engine.gpus is not None:
        raise ConfigError(
            "engine.gpus is ignored on a cluster, which assigns GPUs", got=engine.gpus, hint="remove engine.gpus"
        )
    requested = (section.engine or {}).get("GPU")
    if requested is not None and requested not in (0, engine.tensor_parallel):
        raise ConfigError(
            "cluster.engine and a server use different numbers of GPUs",
            got=f"GPU {requested:g} with engine.tensor_parallel {engine.tensor_parallel}",
            expected=f"GPU {engine.tensor_parallel}",
        )


def refuse_cluster(config: Config, what: str) -> None:
    """Check that a run on this machine only, which messages call `what`, has no cluster.

    Raises:
        ConfigError: the config has a cluster.
    """
    if config.cluster is not None:
        raise ConfigError(f"{what} runs on this machine", got="the key cluster", hint="remove it: cluster=null")
