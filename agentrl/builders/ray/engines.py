"""Engines as actors: a launcher of servers on the actor's node, or a model that the actor serves itself.

pool ─► VLLMServer, SGLangServer ── HTTP ─► server ◄── launched by ServerActor
pool ─► ActorServer ── calls of Ray ─► LocalEngineActor ─► LocalEngine
trainer ── broadcast (gloo, NCCL), or what else engine.transport says ─► server, LocalEngineActor
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from agentrl.builders.ray.actors import ActorEnvironment, NodeActor
from agentrl.builders.ray.connection import Cluster, ClusterPlace
from agentrl.engine import (
    Broadcast,
    Capabilities,
    GenerateRequest,
    Generation,
    InferenceServer,
    ServerLoad,
    ServerLost,
    TensorLayout,
    UpdateGroup,
)
from agentrl.errors import AgentRLError, EngineError
from agentrl.serving.launch import Launcher
from agentrl.serving.local import LocalEngine
from agentrl.weights.collective import GroupMember

T = TypeVar("T")


class EngineHost(NodeActor):
    """Base of actors that serve an engine."""

    async def live(self) -> None:
        """Never return: a caller that awaits it notices the end of the actor."""
        await asyncio.Event().wait()


class ServerActor(EngineHost):
    """One server of vLLM or SGLang, which ends with this actor, however that ends.

    Args:
        setting: Of this actor.
        make: Makes its launcher.
    """

    def __init__(self, setting: ActorEnvironment, make: Callable[[], Launcher]) -> None:
        super().__init__(setting)
        self._make = make
        self._launcher: Launcher | None = None

    async def start(self) -> str:
        """Start the server, or start it again; its address once it is ready.

        Raises:
            UsageError: no interpreter with the engine on this node.
            EngineError: it does not start.
        """
        if self._launcher is None:
            self._launcher = await asyncio.to_thread(self._make)
            (process,) = await self._launcher.start()
        else:
            (name,) = self._launcher.servers
            process = await self._launcher.restart(name)
        return process.url

    async def close(self) -> None:
        """End the server."""
        if self._launcher is not None:
            await self._launcher.close()


class LocalEngineActor(EngineHost):
    """Serves a model with the local engine.

    Args:
        setting: Of this actor.
        make: Loads the model and makes the engine.
    """

    def __init__(self, setting: ActorEnvironment, make: Callable[[], LocalEngine]) -> None:
        super().__init__(setting)
        self._make = make
        self._engine: LocalEngine | None = None
        self._member = GroupMember()
        self._heard: dict[str, Any] = {}
        self._stamps = {0: 0}

    @property
    def engine(self) -> LocalEngine:
        """The engine that serves.

        Raises:
            EngineError: there is none yet.
        """
        if self._engine is None:
            raise EngineError("the engine has not started")
        return self._engine

    async def start(self) -> Capabilities:
        """Load the model and serve, with the weights of its files, even if others were served before."""
        if self._engine is not None:
            await self._engine.close()
        self._engine = await asyncio.to_thread(self._make)
        self._stamps = {0: 0}
        await self._engine.start()
        return self._engine.capabilities

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn."""
        answer = await self.engine.generate(request)
        return replace(answer, versions=[self._stamps[version] for version in answer.versions])

    async def abort(self, request_id: str) -> bool:
        """End a request early."""
        return await self.engine.abort(request_id)

    async def pause(self) -> None:
        """Hold all requests."""
        await self.engine.pause()

    async def resume(self) -> None:
        """Go on."""
        await self.engine.resume()

    async def join(self, group: UpdateGroup) -> None:
        """Meet the trainer."""
        await self._member.join(group)
        self._heard = {}

    async def leave(self) -> None:
        """Leave the trainer's group."""
        self._member.leave()

    async def hear(self, layout: TensorLayout) -> None:
        """Keep what is broadcast next, until `take`."""
        self._heard |= dict((await self._member.receive_bucket(layout)).tensors())

    async def take(self, version: int) -> None:
        """Serve what was heard.

        Args:
            version: What the pool calls it; the engine counts for itself, as one that comes back begins anew.
        """
        heard, self._heard = self._heard, {}
        self._stamps[self.engine.version + 1] = version
        await self.engine.update_weights(heard, self.engine.version + 1)

    async def weight_version(self) -> int:
        """Version of the weights that it serves."""
        return self._stamps[self.engine.version]

    async def load(self) -> ServerLoad:
        """The engine's own count."""
        metrics = self.engine.metrics()
        return ServerLoad(
            running=metrics.running,
            waiting=metrics.waiting,
            cache_used=metrics.details["reserved_tokens"] / self.engine.config.cache_tokens,
            preemptions=int(metrics.details["preemptions"]),
            prompt_tokens=metrics.prompt_tokens,
            cached_tokens=metrics.cached_tokens,
            sampled_tokens=metrics.sampled_tokens,
        )

    async def close(self) -> None:
        """Stop serving."""
        if self._engine is not None:
            await self._engine.close()


class ActorServer(InferenceServer):
    """The client of a `LocalEngineActor`: a server that is reached by calls of Ray.

    Args:
        cluster: That the actor is in.
        actor: Its handle.
        place: Where it is.
    """

    def __init__(self, cluster: Cluster, actor: Any, place: ClusterPlace) -> None:
        self.url = f"actor://{place.node.address}/{place.name}"
        self._cluster, self._actor = cluster, actor

    async def _answer(self, asked: Awaitable[T]) -> T:
        return await answer_of(self._cluster, asked, self.url)

    async def connect(self, *, deadline_s: float) -> None:
        """Let it load its model."""
        try:
            async with asyncio.timeout(deadline_s):
                self.capabilities = await self._answer(self._actor.start.remote())
        except TimeoutError as error:
            raise ServerLost(f"{self.url} is not ready", got=f"no answer in {deadline_s:g} s") from error

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn."""
        try:
            return await self._answer(self._actor.generate.remote(request))
        except asyncio.CancelledError:
            self._actor.abort.remote(request.request_id)
            raise

    async def abort(self, request_id: str) -> bool:
        """End a request early."""
        return await self._answer(self._actor.abort.remote(request_id))

    async def pause(self) -> None:
        """Hold all requests."""
        await self._answer(self._actor.pause.remote())

    async def resume(self) -> None:
        """Go on."""
        await self._answer(self._actor.resume.remote())

    async def load_weights(self, folder: object, version: int) -> None:
        """Not this way: a broadcast reaches it without files."""
        raise EngineError(f"{self.url} hears weights, and reads none", got=f"{folder}, version {version}")

    async def workers(self) -> int:
        """One."""
        return 1

    async def join_group(self, group: UpdateGroup) -> None:
        """Let it meet the trainer."""
        await self._answer(self._actor.join.remote(group))

    async def leave_group(self, group: UpdateGroup) -> None:
        """Let it forget the trainer."""
        await self._answer(self._actor.leave.remote())

    async def receive_weights(
        self, layouts: Sequence[TensorLayout], group: UpdateGroup, broadcast: Broadcast, version: int
    ) -> None:
        """Let it hear one run after the other, and serve them together."""
        for number, layout in enumerate(layouts):
            await asyncio.gather(self._answer(self._actor.hear.remote(layout)), broadcast(number))
        await self._answer(self._actor.take.remote(version))

    async def weight_version(self) -> int:
        """Ask for the version of the weights that are served."""
        return await self._answer(self._actor.weight_version.remote())

    async def load(self) -> ServerLoad:
        """Its load now."""
        return await self._answer(self._actor.load.remote())

    async def checksums(self) -> Mapping[str, str]:
        """None: it does not tell."""
        return {}

    async def is_healthy(self, *, deadline_s: float) -> bool:
        """Check that it answers."""
        with suppress(TimeoutError, AgentRLError):
            async with asyncio.timeout(deadline_s):
                await self._answer(self._actor.load.remote())
                return True
        return False

    async def close(self) -> None:
        """Do nothing: the actor ends with its place."""


async def answer_of(cluster: Cluster, asked: Awaitable[T], name: str) -> T:
    """Wait for an actor's answer.

    Args:
        cluster: That the actor is in.
        asked: A call.
        name: Of the actor.

    Raises:
        AgentRLError: as the actor raised it.
        ServerLost: the actor is gone.
        EngineError: it failed otherwise.
    """
    try:
        return await asked
    except cluster.ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AgentRLError):
            raise error.cause from None
        raise EngineError(f"{name} failed", got=f"{type(error.cause).__name__}: {error.cause}") from error
    except cluster.ray.exceptions.RayError as error:
        raise ServerLost(f"{name} cannot be reached", got=f"{type(error).__name__}: {error}") from error
