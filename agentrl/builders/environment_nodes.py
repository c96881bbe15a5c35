"""Environments and sandboxes of a run on the nodes of its cluster (``cluster.environments``).

config.cluster ─► a place per node ─► EnvironmentNode ─► workers of each environment's pool
                                                     └► sandboxes of the run's tools
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from agentrl.builders.cluster import FOLDER_HINT, RunCluster
from agentrl.builders.ray import (
    MAX_CALLS,
    ClusterPlace,
    EnvironmentActor,
    EnvironmentNode,
    NodeWorkers,
    PlacedActor,
    set_variables,
)
from agentrl.config.config import Config
from agentrl.config.derived import ENVIRONMENTS
from agentrl.errors import ConfigError, SandboxError
from agentrl.remote.server import SandboxServer, ServerSettings
from agentrl.rollout.env_pool import EnvWorker
from agentrl.sandbox import Sandbox, SandboxSpec, open_sandbox, read_spec
from agentrl.sandbox.http import TOKEN_VARIABLE

HTTP = "http"
"""Type of sandboxes that already run elsewhere."""


class EnvironmentNodes:
    """Nodes of a run for its environments and sandboxes.

    Args:
        nodes: Started nodes.
        sandbox: Spec of the sandboxes of tools, if they run on the nodes.
    """

    def __init__(self, nodes: Sequence[EnvironmentNode], sandbox: SandboxSpec | None) -> None:
        self._nodes, self._sandbox = nodes, sandbox
        self._names, self._turn = itertools.count(), itertools.count()

    def workers(self, count: int) -> EnvWorker:
        """Return the workers of an environment pool, `count` processes on each node."""
        return NodeWorkers(self._nodes, f"pool-{next(self._names)}", count)

    @property
    def make_sandbox(self) -> Callable[[], Sandbox] | None:
        """Function that opens a sandbox on the next node; ``None`` if sandboxes do not run on the nodes."""
        return None if self._sandbox is None else self._open_sandbox

    def _open_sandbox(self) -> Sandbox:
        assert self._sandbox is not None
        turn = next(self._turn)
        for offset in range(len(self._nodes)):
            url = self._nodes[(turn + offset) % len(self._nodes)].sandbox_url
            if url:
                return open_sandbox(dataclasses.replace(self._sandbox, type=HTTP, url=url, options={}))
        raise SandboxError("no node can open a sandbox", got="all nodes are being replaced")


@asynccontextmanager
async def open_environment_nodes(
    run: RunCluster | None, config: Config, *, say: Callable[[str], None]
) -> AsyncIterator[EnvironmentNodes | None]:
    """Start the environment nodes of a run; they end with the block. ``None`` if the run has none.

    Raises:
        UsageError: a node does not see a shared folder, or does not support the sandboxes.
        EngineError: a node's actor does not start.
    """
    places = [] if run is None else [place for name, place in run.places.items() if name.startswith(ENVIRONMENTS)]
    if run is None or not places:
        yield None
        return
    sandbox = None if config.agent.sandbox is None else read_spec(config.agent.sandbox)
    if sandbox is not None and sandbox.type == HTTP:
        sandbox = None
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)
    shared = {path: hint for path, hint in run.shared.items() if hint == FOLDER_HINT}

    def make_actor(place: ClusterPlace) -> Any:
        settings = ServerSettings(
            host=place.node.address, port=0, token=token, max_sessions=config.rollout.max_concurrent
        )
        server = None if sandbox is None else partial(SandboxServer, sandbox, settings)
        setting = run.setting(place.name, place.name, shared=shared)
        return run.cluster.actor(place, EnvironmentActor, setting, server, calls=MAX_CALLS)

    nodes: list[EnvironmentNode] = []
    with nullcontext() if sandbox is None else set_variables({TOKEN_VARIABLE: token}):
        try:
            for place in places:
                actor = PlacedActor(run.cluster, place, make_actor)
                nodes.append(EnvironmentNode(run.cluster, actor, shared, say))
            for node in nodes:
                await node.start()
            yield EnvironmentNodes(nodes, sandbox)
        finally:
            await asyncio.gather(*(node.close() for node in nodes), return_exceptions=True)


def check_environment_nodes(config: Config) -> None:
    """Check that the environments and tools of a run can be placed on a cluster.

    Raises:
        ConfigError: an environment requires the run's own process, or ``cluster.environment`` is ignored.
    """
    section = config.cluster
    if section is None:
        return
    if section.environments == 0:
        if section.environment is not None:
            raise ConfigError(
                "cluster.environment is ignored without cluster.environments",
                got=section.environment,
                hint="set the number of workers: cluster.environments=2",
            )
        return
    chosen = {"environment": config.environment, **{f"environments.{k}": v for k, v in config.environments.items()}}
    for key, environment in chosen.items():
        if environment is not None and environment.isolation not in (None, "process"):
            raise ConfigError(
                f"{key}.isolation contradicts cluster.environments",
                got=environment.isolation.value if environment.isolation else None,
                expected="process, or no value: environments on other nodes run in worker processes",
            )
