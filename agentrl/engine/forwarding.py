"""Base class of engines that forward requests to another engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.engine import Capabilities, EngineMetrics, GenerateRequest, Generation, PolicyEngine


class ForwardingEngine(PolicyEngine):
    """Engine that passes every call to another one; subclasses change some of them."""

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Capabilities of the engine, which are known once it has started."""
        return self._engine.capabilities

    @property
    def version(self) -> int:
        """Version of the current weights."""
        return self._engine.version

    async def start(self) -> None:
        """Prepare the engine."""
        await self._engine.start()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample an answer."""
        return await self._engine.generate(request)

    async def abort(self, request_id: str) -> bool:
        """End a request early."""
        return await self._engine.abort(request_id)

    async def pause(self) -> None:
        """Stop sampling."""
        await self._engine.pause()

    async def resume(self) -> None:
        """Continue sampling."""
        await self._engine.resume()

    async def update_weights(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Replace the weights."""
        await self._engine.update_weights(weights, version)

    async def end_session(self, session_id: str) -> None:
        """Release the cache of a session."""
        await self._engine.end_session(session_id)

    def metrics(self) -> EngineMetrics:
        """Return the current load."""
        return self._engine.metrics()

    async def close(self) -> None:
        """Release all resources."""
        await self._engine.close()
