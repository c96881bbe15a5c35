"""The engines of a run on its cluster: a launcher of servers or a local engine in an actor each, and a pool of all.

config.engine on config.cluster ─► ServerActor, LocalEngineActor ─► clients ─► ServerPool
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.assembly.cluster import FOLDER_HINT, OnLoss, RunCluster
from agentrl.assembly.models import load_images
from agentrl.assembly.servers import SERVED_MODEL, ServedModel, make_launcher, make_server, untied
from agentrl.cluster import ActorServer, LocalEngineActor, Place, ServerActor, watching_actors
from agentrl.cluster.connection import MOST_CALLS
from agentrl.cluster.engines import answer_of
from agentrl.cluster.host import look
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.server import InferenceServer, ServerLost
from agentrl.serving.launch import Launcher
from agentrl.serving.local import LocalEngine
from agentrl.serving.pool import PoolSettings, ServerPool
from agentrl.training.models.loading import load_model


@asynccontextmanager
async def open_placed_pool(
    run: RunCluster, model: ServedModel, *, version: int, say: Callable[[str], None], on_loss: OnLoss
) -> AsyncIterator[ServerPool]:
    """The engines of a run on its cluster, ready to serve; they end with the block.

    Args:
        run: Its cluster.
        model: What they serve.
        version: Of the weights that the first sync will bring.
        say: Is told what happens to them.
        on_loss: Is called from a thread when one has ended by itself.

    Raises:
        UsageError: no interpreter with the engine on a node, or something that a node does not see.
        EngineError: a server does not start.
    """
    engines = _PlacedEngines(run, model)
    try:
        servers, settings = await engines.start()
        async with AsyncExitStack() as stack:
            stack.enter_context(watching_actors(run.cluster, engines.actors, on_loss))
            pool = ServerPool(servers, settings, restart=engines.restart, version=version, say=say)
            stack.push_async_callback(pool.close)
            await pool.start()
            yield pool
    finally:
        await engines.close()


class _PlacedEngines:
    """The actors of the engines of a run."""

    def __init__(self, run: RunCluster, model: ServedModel) -> None:
        self._run, self._model = run, model
        self._cluster, self._engine = run.cluster, run.config.engine
        self._places = [place for name, place in run.places.items() if name.startswith("server")]
        self.actors: list[tuple[Any, Place]] = []

    async def start(self) -> tuple[list[InferenceServer], PoolSettings]:
        """Start all of them; the launched ones are ready then."""
        if isinstance(self._engine, ServerEngineConfig):
            served = await asyncio.to_thread(
                untied, self._model.path, self._run.folder / SERVED_MODEL, dtype=self._model.dtype
            )
            self._model = replace(self._model, path=str(served))
        shared = {**self._run.shared, **_folder_of(self._model)}
        for place in self._places:
            log = place.name if isinstance(self._engine, LocalEngineConfig) else f"{place.name}-actor"
            setting = self._run.setting(place.name, log, shared=shared)
            actor = self._cluster.actor(place, self._kind, setting, self._make(place), calls=MOST_CALLS)
            self.actors.append((actor, place))
        for actor, place in self.actors:
            await asyncio.to_thread(look, self._cluster, actor, shared, place)
        started = await asyncio.gather(*(self._serve(actor, place) for actor, place in self.actors))
        return list(started), self._settings

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
            concurrency=self._engine.slots, most_concurrency=2 * self._engine.slots, connect_timeout_s=section.timeout_s
        )

    def _make(self, place: Place) -> Callable[[], Launcher | LocalEngine]:
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

    async def _serve(self, actor: Any, place: Place) -> InferenceServer:
        if isinstance(self._engine, LocalEngineConfig):
            return ActorServer(self._cluster, actor, place)
        assert isinstance(self._engine, ServerEngineConfig)
        url = await answer_of(self._cluster, actor.start.remote(), place.name)
        return make_server(self._engine, url, self._model.vocab_size)

    async def restart(self, index: int) -> InferenceServer:
        """Start the server of an actor again; the loss of an actor is the end of the run."""
        actor, place = self.actors[index]
        try:
            server = await self._serve(actor, place)
            await server.connect(deadline_s=self._settings.connect_timeout_s)
        except ServerLost as error:
            raise self._cluster.loss(place, place.name, error.__cause__ or error) from error
        return server

    async def close(self) -> None:
        """End the servers, and the actors."""
        closing = [answer_of(self._cluster, actor.close.remote(), place.name) for actor, place in self.actors]
        await asyncio.gather(*closing, return_exceptions=True)
        for actor, _ in self.actors:
            self._cluster.kill(actor)
        self.actors = []


def _folder_of(model: ServedModel) -> dict[str, str]:
    """The folder that every node must see; none of a model on the hub."""
    return {str(Path(model.path).absolute()): FOLDER_HINT} if Path(model.path).is_dir() else {}


def make_engine(section: LocalEngineConfig, model: ServedModel, *, device: str) -> LocalEngine:
    """A local engine with a copy of the model, in the process that calls."""
    loaded = load_model(model.path, dtype=model.dtype, device=device)
    return LocalEngine(loaded, section, reader=load_images(model.path))
