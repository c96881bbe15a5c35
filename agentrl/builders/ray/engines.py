"""Engines as actors: a launcher of servers on the actor's node, or a local engine in the actor.

pool ─► VLLMServer, SGLangServer ── HTTP ─► server ◄── launched by ServerActor
pool ─► ActorServer ── calls of Ray ─► LocalEngineActor ─► LocalEngine
trainer ── broadcast (gloo, NCCL), or another engine.transport ─► server, LocalEngineActor
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
from agentrl.errors.foreign import run_in_own_thread
from agentrl.serving.launch import Launcher
from agentrl.serving.local import LocalEngine
from agentrl.weights import GroupMember

T = TypeVar("T")

ACTOR_CALL_S = 60.0
"""Timeout of calls that a healthy actor answers at once."""
JOIN_S = 300.0
"""Timeout of joining a process group; the same as for ranks."""


class EngineHost(NodeActor):
    """Base class of actors with an engine."""

    async def ping(self) -> None:
        """Return at once; proves that the actor's process runs."""


class ServerActor(EngineHost):
    """Actor with a vLLM or SGLang server, which ends when the actor exits for any reason."""

    def __init__(self, setting: ActorEnvironment, make: Callable[[], Launcher]) -> None:
        super().__init__(setting)
        self._make = make
        self._launcher: Launcher | None = None

    async def start(self) -> str:
        """Start or restart the server, and return its address once it is ready.

        Raises:
            UsageError: no interpreter with the engine is found on this node.
            EngineError: the server does not start.
        """
        if self._launcher is None:
            self._launcher = await run_in_own_thread(self._make)
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
    """Actor with a local engine."""

    def __init__(self, setting: ActorEnvironment, make: Callable[[], LocalEngine]) -> None:
        super().__init__(setting)
        self._make = make
        self._engine: LocalEngine | None = None
        self._member = GroupMember()
        self._received: dict[str, Any] = {}
        self._stamps = {0: 0}

    @property
    def engine(self) -> LocalEngine:
        """Running engine.

        Raises:
            EngineError: the engine has not started.
        """
        if self._engine is None:
            raise EngineError("the engine has not started")
        return self._engine

    async def start(self) -> Capabilities:
        """Load the model from its files and start the engine; replaces an engine that was started before."""
        if self._engine is not None:
            await self._engine.close()
        self._engine = await run_in_own_thread(self._make)
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
        """Resume sampling."""
        await self.engine.resume()

    async def join(self, group: UpdateGroup) -> None:
        """Join the trainer's process group."""
        await self._member.join(group)
        self._received = {}

    async def leave(self) -> None:
        """Leave the trainer's group."""
        self._member.leave()

    async def receive(self, layout: TensorLayout) -> None:
        """Receive the next broadcast, and keep its tensors until `apply_weights`."""
        self._received |= dict((await self._member.receive_bucket(layout)).tensors())

    async def apply_weights(self, version: int) -> None:
        """Use the received weights.

        Args:
            version: Version in the pool. The engine counts separately, from 0 after a restart.
        """
        weights, self._received = self._received, {}
        self._stamps[self.engine.version + 1] = version
        await self.engine.update_weights(weights, self.engine.version + 1)

    async def weight_version(self) -> int:
        """Return the pool's version of the served weights."""
        return self._stamps[self.engine.version]

    async def load(self) -> ServerLoad:
        """Return the engine's load."""
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
    """Client of a `LocalEngineActor`, which is reached through Ray calls."""

    def __init__(self, cluster: Cluster, actor: Any, place: ClusterPlace) -> None:
        self.url = f"actor://{place.node.address}/{place.name}"
        self._cluster, self._actor = cluster, actor

    async def _answer(self, call: Awaitable[T], *, deadline_s: float | None = ACTOR_CALL_S) -> T:
        return await answer_of(self._cluster, call, self.url, deadline_s=deadline_s)

    async def connect(self, *, deadline_s: float) -> None:
        """Let the actor load its model."""
        self.capabilities = await self._answer(self._actor.start.remote(), deadline_s=deadline_s)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn; the caller sets the deadline."""
        try:
            return await self._answer(self._actor.generate.remote(request), deadline_s=None)
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
        """Resume sampling."""
        await self._answer(self._actor.resume.remote())

    async def load_weights(self, folder: object, version: int) -> None:
        """Raise `EngineError`: weights are sent by broadcast only."""
        raise EngineError(f"{self.url} accepts broadcast weights only", got=f"{folder}, version {version}")

    async def workers(self) -> int:
        """Return 1."""
        return 1

    async def join_group(self, group: UpdateGroup) -> None:
        """Let the actor join the trainer's process group."""
        await self._answer(self._actor.join.remote(group), deadline_s=JOIN_S)

    async def leave_group(self, group: UpdateGroup) -> None:
        """Let the actor leave the trainer's process group."""
        await self._answer(self._actor.leave.remote())

    async def receive_weights(
        self, layouts: Sequence[TensorLayout], group: UpdateGroup, broadcast: Broadcast, version: int
    ) -> None:
        """Let the actor receive all broadcasts and then use them together; the caller sets the deadline."""
        for number, layout in enumerate(layouts):
            received = self._answer(self._actor.receive.remote(layout), deadline_s=None)
            await asyncio.gather(received, broadcast(number))
        await self._answer(self._actor.apply_weights.remote(version), deadline_s=None)

    async def weight_version(self) -> int:
        """Return the version of the served weights."""
        return await self._answer(self._actor.weight_version.remote())

    async def load(self) -> ServerLoad:
        """Return the current load."""
        return await self._answer(self._actor.load.remote())

    async def checksums(self) -> Mapping[str, str]:
        """Return no checksums."""
        return {}

    async def is_healthy(self, *, deadline_s: float) -> bool:
        """Return True if the actor answers in time."""
        with suppress(AgentRLError):
            await self._answer(self._actor.load.remote(), deadline_s=deadline_s)
            return True
        return False

    async def close(self) -> None:
        """Do nothing: the cluster ends the actor."""


async def answer_of(cluster: Cluster, call: Awaitable[T], name: str, *, deadline_s: float | None) -> T:
    """Wait for an actor's answer; without `deadline_s`, the caller sets a deadline.

    Raises:
        AgentRLError: the actor raised this error.
        ServerLost: the actor cannot be reached, or missed the deadline.
        EngineError: the call failed otherwise.
    """
    try:
        async with asyncio.timeout(deadline_s):
            return await call
    except TimeoutError:
        raise ServerLost(f"{name} does not answer", got=f"no answer in {deadline_s} s") from None
    except cluster.ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AgentRLError):
            raise error.cause from None
        raise EngineError(f"{name} failed", got=f"{type(error.cause).__name__}: {error.cause}") from error
    except cluster.ray.exceptions.RayError as error:
        raise ServerLost(f"{name} cannot be reached", got=f"{type(error).__name__}: {error}") from error
