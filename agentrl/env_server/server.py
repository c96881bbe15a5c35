"""The server of one environment: its life, from the first environment, which tries the options, to the last session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.env import EnvironmentSpec
from agentrl.env_server.listening import Listener
from agentrl.env_server.routes import make_application
from agentrl.env_server.session import Clock
from agentrl.env_server.sessions import Sessions
from agentrl.remote.served import Part, write_served
from agentrl.rollout.environments import EnvironmentHost

SWEEPS_PER_LEASE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How an environment is served."""

    host: str = "127.0.0.1"
    """The address to listen on; the default can be reached from this machine only."""
    port: int = 0
    """0 takes any that is free."""
    token: str | None = None
    """What clients must send; ``None``: nothing."""
    max_sessions: int = 256
    """Most environments at once."""
    lease_s: float = 900.0
    """Seconds without a request after which a session is closed."""
    workers: int = 4
    """Threads or processes, for environments whose code does not run in the event loop."""
    reset_timeout_s: float = 60.0
    """Deadline of making and resetting an environment."""
    step_timeout_s: float = 30.0
    """Deadline of everything else."""

    @property
    def most_connections(self) -> int:
        """Connections at once: a session has one for each request that is under way."""
        return 4 * self.max_sessions + 64


class EnvironmentServer:
    """Serves an environment until it is closed. Lives in one event loop.

    Args:
        spec: The environment.
        options: Put over the spec's own.
        settings: How it is served.
        clock: Seconds, for leases.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        options: Mapping[str, Any],
        settings: ServerSettings,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.url = ""
        self._options = {**spec.options, **options}
        self._host = EnvironmentHost(
            spec,
            options=options,
            workers=settings.workers,
            max_concurrent=settings.max_sessions,
            reset_timeout_s=settings.reset_timeout_s,
            step_timeout_s=settings.step_timeout_s,
        )
        self.sessions = Sessions(
            self._host,
            most=settings.max_sessions,
            lease_s=settings.lease_s,
            tool_timeout_s=settings.step_timeout_s,
            clock=clock,
        )
        self._listener: Listener | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make an environment to see what it offers, then listen.

        Raises:
            UsageError: the options are wrong, or the port is taken.
            EnvironmentFailure: the environment cannot be made.
        """
        application = make_application(
            info=await self._look(),
            sessions=self.sessions,
            tasks=lambda split: self.spec.tasks(split, **self._options),
            splits=self.spec.splits,
            token=self.settings.token,
            host=self.settings.host,
        )
        self._listener = Listener(application, most_connections=self.settings.most_connections)
        self.url = await self._listener.start(self.settings.host, self.settings.port)
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Stop listening, close all sessions and environments. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        if self._listener is not None:
            await self._listener.close()
        await self.sessions.close()
        await self._host.close()

    async def _look(self) -> dict[str, Any]:
        """What clients are told about the environment."""
        async with self._host.borrow("the server") as environment:
            parts: frozenset[str] = await environment.call("parts")
            hint: str = await environment.call("action_hint")
        return write_served(self.spec, self._options, frozenset(map(Part, parts)), hint)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.settings.lease_s / SWEEPS_PER_LEASE)
            self.sessions.expire()
