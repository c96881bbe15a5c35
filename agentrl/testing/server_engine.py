"""Policy engine with one inference server, for `check_engine` and for tests of one server.

report = await check_engine(lambda: ServerEngine(VLLMServer(...)), sampling=ServerEngine.sampling)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.engine import EngineMetrics, GenerateRequest, Generation, InferenceServer, PolicyEngine
from agentrl.errors import UsageError


class ServerEngine(PolicyEngine):
    """Policy engine with a single server.

    Args:
        server: Server, which `start` connects and `close` closes.
        connect_timeout_s: Deadline of the server's first answer.
    """

    def __init__(self, server: InferenceServer, *, connect_timeout_s: float = 600.0) -> None:
        self.server = server
        self._connect_timeout_s = connect_timeout_s
        self._version = 0
        self._is_paused = False
        self._metrics = EngineMetrics()

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._version

    async def start(self) -> None:
        """Connect to the server."""
        await self.server.connect(deadline_s=self._connect_timeout_s)
        self.capabilities = self.server.capabilities
        self._version = await self.server.weight_version()

    async def sampling(self) -> int:
        """Count the running requests, which have their first token, and update `metrics`."""
        load = await self.server.load()
        self._metrics = EngineMetrics(
            running=load.running,
            waiting=load.waiting,
            prompt_tokens=load.prompt_tokens,
            cached_tokens=load.cached_tokens,
            sampled_tokens=load.sampled_tokens,
        )
        return load.running

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn."""
        return await self.server.generate(request)

    async def abort(self, request_id: str) -> bool:
        """End a request early."""
        return await self.server.abort(request_id)

    async def pause(self) -> None:
        """Hold all requests."""
        await self.server.pause()
        self._is_paused = True

    async def resume(self) -> None:
        """Continue all requests."""
        await self.server.resume()
        self._is_paused = False

    async def update_weights(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Load the weights in the folder ``weights["folder"]`` while the server is paused."""
        if weights is None:
            raise UsageError("a server cannot share weights", got=None, expected='{"folder": path}')
        was_paused = self._is_paused
        if not was_paused:
            await self.pause()
        await self.server.load_weights(Path(weights["folder"]), version)
        self._version = version
        if not was_paused:
            await self.resume()

    async def end_session(self, session_id: str) -> None:
        """Do nothing: servers have no sessions."""

    def metrics(self) -> EngineMetrics:
        """Return the metrics that `sampling` read last."""
        return self._metrics

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        await self.server.close()
