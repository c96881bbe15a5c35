"""The servers of one engine on this machine: started together, restarted one by one, ended together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from agentrl.errors import EngineError
from agentrl.serving.launch.process import (
    GRACE_S,
    CommandMaker,
    LaunchCommand,
    ServerExited,
    ServerProcess,
    StartProgress,
)
from agentrl.serving.launch.resources import (
    PortReservation,
    is_free,
    reserve_exactly,
    reserve_port,
    usable_gpus,
    visible_devices,
)

PORT_ATTEMPTS = 3
"""Ports that are tried for a server while programs that are not ours take them first."""


class Launcher:
    """Starts servers called ``server-0``, ``server-1``, …; used from one event loop, or as an async context manager.

    Args:
        make_command: The command of a server, from its port and GPUs.
        gpus: Positions of the GPUs of each server (`agentrl.serving.launch.resources.assign_gpus`); as many as servers.
        logs: Folder of their logs, ``server-0.log`` and so on; a restarted server goes on in its log.
        start_timeout_s: Seconds that a server gets to become ready.
        grace_s: Seconds that a server gets to end by itself.
        on_progress: Called a few times a second for each server that is starting.
        ports: The port of each server at the first start; free ones when left out.
        names: Other names than these.
    """

    def __init__(
        self,
        make_command: CommandMaker,
        *,
        gpus: Sequence[Sequence[int]],
        logs: Path,
        start_timeout_s: float,
        grace_s: float = GRACE_S,
        on_progress: Callable[[StartProgress], None] | None = None,
        ports: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self._make_command = make_command
        self._gpus = dict(zip(names or server_names(len(gpus)), gpus, strict=True))
        self._logs = logs
        self._start_timeout_s = start_timeout_s
        self._grace_s = grace_s
        self._on_progress = on_progress
        self._asked_ports = dict(zip(self._gpus, ports, strict=True)) if ports is not None else {}
        self._servers: dict[str, ServerProcess] = {}
        self._reserved: dict[str, PortReservation] = {}
        self._closed = False

    @property
    def servers(self) -> dict[str, ServerProcess]:
        """The servers by name, those too that are starting or have ended."""
        return dict(self._servers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self) -> list[ServerProcess]:
        """Start all servers and wait until they are ready; when one fails, all are ended.

        Raises:
            UsageError: a port that was asked for is in use, or a program cannot be run.
            EngineError: a server ended, or was not ready in time; holds the end of its log.
        """
        starts = [asyncio.create_task(self._start(name, self._asked_ports.get(name))) for name in self._gpus]
        try:
            return list(await asyncio.gather(*starts))
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close()
            raise

    async def restart(self, name: str) -> ServerProcess:
        """Kill what is left of a server, and start it under the same name on another port and the same GPUs.

        Raises:
            EngineError: as `start`; or the launcher is closed.
        """
        await self._end(name, at_once=True)
        return await self._start(name, None)

    async def close(self) -> None:
        """End all servers with everything that they started; idempotent."""
        self._closed = True
        await asyncio.gather(*(self._end(name, at_once=False) for name in list(self._servers)))

    async def _start(self, name: str, asked_port: int | None, attempts: int = PORT_ATTEMPTS) -> ServerProcess:
        server = self._launch(name, asked_port)
        try:
            await server.wait_ready(deadline_s=self._start_timeout_s, on_progress=self._on_progress)
        except EngineError as error:
            await server.close(at_once=True)
            lost_its_port = isinstance(error, ServerExited) and not is_free(server.port)
            if not lost_its_port or asked_port is not None or attempts == 1:
                raise
            return await self._start(name, None, attempts - 1)
        return server

    def _launch(self, name: str, asked_port: int | None) -> ServerProcess:
        if self._closed:
            raise EngineError(f"{name} cannot be started", got="servers that are being ended")
        self._release(name)
        self._reserved[name] = reserve_port() if asked_port is None else reserve_exactly(asked_port)
        port = self._reserved[name].port
        command, log = self._command(port, self._gpus[name]), self._logs / f"{name}.log"
        server = ServerProcess(command, name=name, port=port, log=log, grace_s=self._grace_s)
        self._servers[name] = server
        return server

    def _command(self, port: int, gpus: Sequence[int]) -> LaunchCommand:
        command = self._make_command(port, gpus)
        shown = visible_devices(gpus, usable_gpus(os.environ)) if gpus else {}
        return replace(command, env={**command.env, **shown})

    async def _end(self, name: str, *, at_once: bool) -> None:
        if (server := self._servers.get(name)) is not None:
            await server.close(at_once=at_once)
        self._release(name)

    def _release(self, name: str) -> None:
        if (reservation := self._reserved.pop(name, None)) is not None:
            reservation.release()


def server_names(count: int) -> list[str]:
    """The names of a launcher's servers."""
    return [f"server-{number}" for number in range(count)]
