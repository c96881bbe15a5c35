"""Environments and sandboxes on the nodes of a cluster: an actor per node, with worker processes and a sandbox server.

EnvPool ─► NodeWorkers ── calls of Ray ─► EnvironmentActor ─► ProcessWorker ─► environment
tools ─► HttpSandbox ── HTTP ─► sandbox server in EnvironmentActor ─► sandbox

A lost actor is replaced, on another node if its node is lost. The calls that it had not answered fail as infrastructure
failures, so their episodes are played again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from agentrl.builders.ray.actors import ActorEnvironment, NodeActor, PlacedActor
from agentrl.builders.ray.connection import Cluster
from agentrl.builders.ray.engines import answer_of
from agentrl.engine import ServerLost
from agentrl.env import AnyEnv
from agentrl.errors import AgentRLError, EnvironmentFailure, UsageError
from agentrl.errors.deadlines import async_boundary
from agentrl.errors.foreign import run_in_own_thread
from agentrl.rollout.env_processes import ProcessWorker
from agentrl.rollout.env_workers import EnvBackend

_log = logging.getLogger(__name__)

NODE_CHECK_EVERY_S = 2.0
NODE_PING_S = 30.0
"""Timeout of pings; an actor that does not answer is replaced, because its process may be suspended."""
NODE_RETRY_S = 1.0
"""Seconds before the first attempt to replace an actor is repeated; doubled after every failed attempt."""
MAX_NODE_RETRY_S = 30.0
NODE_CLOSE_S = 10.0
"""Seconds before an actor that does not end its environments is killed, which ends them."""


class SandboxHost(Protocol):
    """Server of sandboxes."""

    url: str
    """Address; set by `start`."""

    async def start(self) -> None:
        """Start to listen."""

    async def close(self) -> None:
        """Close all sandboxes."""


class EnvironmentActor(NodeActor):
    """Actor with worker processes for environments, and a server of sandboxes if the run's tools need one."""

    def __init__(self, setting: ActorEnvironment, make_server: Callable[[], SandboxHost] | None) -> None:
        super().__init__(setting)
        self._make_server = make_server
        self._server: SandboxHost | None = None
        self._workers: dict[str, ProcessWorker] = {}
        self._environments: dict[int, EnvBackend] = {}
        self._numbers = itertools.count()

    async def ping(self) -> None:
        """Return at once; proves that the actor's process runs."""

    async def start(self) -> str:
        """Start the server of sandboxes, and return its address; empty without one."""
        if self._make_server is not None and self._server is None:
            self._server = self._make_server()
            await self._server.start()
        return "" if self._server is None else self._server.url

    async def make(self, worker: str, made: bytes, what: str, deadline_s: float) -> int:
        """Make an environment from its pickled factory and options in a worker process, and return its number.

        The deadline counts from when the worker is free.

        Raises:
            EnvironmentFailure: the environment cannot be made.
        """
        async with async_boundary(EnvironmentFailure, what, deadline_s=None):
            factory, options = pickle.loads(made)
        if worker not in self._workers:
            self._workers[worker] = ProcessWorker()
        backend = await self._workers[worker].make(factory, options, what=what, deadline_s=deadline_s)
        number = next(self._numbers)
        self._environments[number] = backend
        return number

    async def call(self, number: int, method: str, arguments: tuple[Any, ...], what: str, deadline_s: float) -> Any:
        """Call a method of an environment; see `EnvBackend.call`."""
        try:
            return await self._environments[number].call(method, *arguments, what=what, deadline_s=deadline_s)
        finally:
            if method == "close":
                del self._environments[number]

    async def alive(self) -> set[int]:
        """Return the numbers of the environments whose processes run."""
        return {number for number, backend in self._environments.items() if backend.is_alive}

    async def drain(self, workers: Sequence[str], patience_s: float) -> None:
        """Wait until the workers' calls have ended; abandon those that nothing awaits after `patience_s` seconds."""
        found = [self._workers[name] for name in workers if name in self._workers]
        await asyncio.gather(*(worker.drain(patience_s) for worker in found))

    async def close_workers(self, workers: Sequence[str]) -> None:
        """End the processes of workers."""
        found = [self._workers.pop(name) for name in workers if name in self._workers]
        await asyncio.gather(*(worker.close() for worker in found))

    async def close(self) -> None:
        """End all worker processes and the server of sandboxes."""
        await self.close_workers(list(self._workers))
        if self._server is not None:
            await self._server.close()


class EnvironmentNode:
    """Client of an `EnvironmentActor`, which is replaced after its loss."""

    def __init__(
        self, cluster: Cluster, actor: PlacedActor, shared: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.generation = 0
        """Number of times that the actor was replaced; environments of earlier generations are lost."""
        self.alive: set[int] = set()
        """Numbers of the environments whose processes run."""
        self.sandbox_url = ""
        """Address of the server of sandboxes; empty without one."""
        self._cluster, self._actor, self._shared, self._say = cluster, actor, shared, say
        self._ready = asyncio.Event()
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._look = asyncio.Event()
        self._monitor: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Name of the actor's place."""
        return self._actor.name

    @property
    def is_ready(self) -> bool:
        """True unless the actor is being replaced."""
        return self._ready.is_set()

    async def start(self) -> None:
        """Wait until the actor runs, and monitor it from then on.

        Raises:
            UsageError: the actor does not see shared files, or its node does not support the sandboxes.
            EngineError: the actor does not start.
        """
        await run_in_own_thread(self._actor.check, self._shared)
        await self._prepare()
        self._monitor = asyncio.create_task(self._watch(), name=f"monitor of {self.name}")

    async def _prepare(self) -> None:
        timeout_s = self._cluster.section.timeout_s
        self.sandbox_url = await self._answer(self._actor.handle.start.remote(), deadline_s=timeout_s)
        self._ready.set()

    async def _answer(self, call: Awaitable[Any], *, deadline_s: float | None = None) -> Any:
        return await answer_of(self._cluster, call, self.name, deadline_s=deadline_s)

    async def wait_until_ready(self) -> None:
        """Wait until the actor has been replaced, if it was lost.

        Raises:
            EnvironmentFailure: it was not replaced within ``cluster.timeout_s``.
        """
        what, deadline_s = f"the replacement of {self.name}", self._cluster.section.timeout_s
        async with async_boundary(EnvironmentFailure, what, deadline_s=deadline_s):
            await self._ready.wait()

    async def ask(self, method: str, *arguments: Any, what: str) -> Any:
        """Call a method of the actor, which has its own deadline.

        Raises:
            EnvironmentFailure: the call failed, or the actor was lost.
            UsageError: an error that the user must fix.
        """
        gone, call = self._gone, getattr(self._actor.handle, method).remote(*arguments)
        answer = asyncio.ensure_future(self._answer(call))
        both: set[asyncio.Future[Any]] = {answer, gone}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        except (EnvironmentFailure, UsageError):
            raise
        except AgentRLError as error:
            if isinstance(error, ServerLost):  # no more calls until a ping is answered
                self._ready.clear()
                self._look.set()
            raise EnvironmentFailure(f"{what} failed", got=error) from error
        finally:
            if not answer.done():
                answer.cancel()
        raise EnvironmentFailure(f"{what} failed", got=f"{self.name}, its environment worker, was lost")

    async def refresh(self) -> None:
        """Refresh the set of live environments after a failed call."""
        generation = self.generation
        with suppress(AgentRLError):
            alive = await self.ask("alive", what=f"reading the environments of {self.name}")
            if generation == self.generation:
                self.alive = alive

    async def _watch(self) -> None:
        while True:
            try:
                await self._answer(self._actor.handle.ping.remote(), deadline_s=NODE_PING_S)
                self._ready.set()
            except AgentRLError as error:
                await self._replace(error)
            self._look.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(NODE_CHECK_EVERY_S):
                    await self._look.wait()

    async def _replace(self, error: AgentRLError) -> None:
        self._ready.clear()
        self.generation += 1
        self.alive, self.sandbox_url = set(), ""
        self._gone.set_result(None)
        self._gone = asyncio.get_running_loop().create_future()
        place, wait_s = self._actor.place, NODE_RETRY_S
        loss = self._cluster.loss(place, place.name, error.__cause__ or error, kind=EnvironmentFailure)
        self._say(f"{loss}. It is being restarted, and its episodes are played again")
        while not self.is_ready:
            try:
                await run_in_own_thread(self._actor.start_again, self._shared)
                await self._prepare()
            except AgentRLError as failure:
                self._say(f"{place.name} could not be started again: {failure}")
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, MAX_NODE_RETRY_S)
        self._say(f"{place.name} is on {self._actor.place.node} now")

    async def close(self) -> None:
        """End the actor; it is killed if it has not started or does not answer."""
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.gather(self._monitor, return_exceptions=True)
            with suppress(AgentRLError):
                await self._answer(self._actor.handle.close.remote(), deadline_s=NODE_CLOSE_S)
        self._cluster.kill(self._actor.handle)


class NodeWorkers:
    """Worker processes of one environment pool, spread over the nodes of a run; an `EnvWorker`.

    Each node has `count` of them.
    """

    def __init__(self, nodes: Sequence[EnvironmentNode], name: str, count: int) -> None:
        self._names = [f"{name}-{number}" for number in range(count)]
        self._nodes = nodes
        self._turn = itertools.count()

    async def make(
        self, factory: Callable[..., AnyEnv], options: Mapping[str, Any], *, what: str, deadline_s: float
    ) -> EnvBackend:
        """Make an environment on the next node that is ready; wait for one if none is."""
        try:
            made = pickle.dumps((factory, dict(options)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"{what} cannot run on another node",
                got=error,
                expected="a factory and options that can be pickled and imported by name",
                hint="move the environment into its own module, or set cluster.environments to 0",
            ) from error
        node, turn = await self._next_node()
        generation, worker = node.generation, self._names[turn // len(self._nodes) % len(self._names)]
        number = await node.ask("make", worker, made, what, deadline_s, what=what)
        if generation == node.generation:
            node.alive.add(number)
        return NodeBackend(node, number, generation)

    async def _next_node(self) -> tuple[EnvironmentNode, int]:
        turn = next(self._turn)
        for offset in range(len(self._nodes)):
            node = self._nodes[(turn + offset) % len(self._nodes)]
            if node.is_ready:
                return node, turn
        node = self._nodes[turn % len(self._nodes)]
        await node.wait_until_ready()
        return node, turn

    async def drain(self, patience_s: float) -> None:
        """Wait until the workers' calls have ended; abandon those that nothing awaits after `patience_s` seconds."""
        await self._ask_all("drain", self._names, patience_s)

    async def close(self) -> None:
        """End the worker processes."""
        await self._ask_all("close_workers", self._names)

    async def _ask_all(self, method: str, *arguments: Any) -> None:
        ready = [node for node in self._nodes if node.is_ready]
        calls = (node.ask(method, *arguments, what=f"{method} of {node.name}") for node in ready)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, AgentRLError):
                _log.warning("%s", outcome)
            elif outcome is not None:
                raise outcome


class NodeBackend(EnvBackend):
    """Environment in a worker process on a node."""

    def __init__(self, node: EnvironmentNode, number: int, generation: int) -> None:
        self._node, self._number, self._generation = node, number, generation

    @property
    def is_alive(self) -> bool:
        """True if neither the actor nor the worker process of the environment was replaced."""
        return self._generation == self._node.generation and self._number in self._node.alive

    async def call(self, method: str, *arguments: Any, deadline_s: float, what: str) -> Any:
        """Send the call to the node; the deadline counts from when the worker process is free."""
        if self._generation != self._node.generation:
            raise EnvironmentFailure(f"{what} failed", got=f"{self._node.name}, its environment worker, was lost")
        try:
            return await self._node.ask("call", self._number, method, arguments, what, deadline_s, what=what)
        except EnvironmentFailure:
            await self._node.refresh()
            raise
