"""The contract of an inference server: a process that samples for one model and is reached over HTTP.

`agentrl.policy.PolicyEngine` is what agent loops talk to. A pool of servers is such an engine; one server is what the
pool routes to, and what weight sync updates. A server never hides a failure: the pool decides what becomes of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import EngineError
from agentrl.policy import Capabilities, GenerateRequest, Generation


class ServerLost(EngineError):
    """The server cannot be reached any more, or dropped the connection: another one may take over its requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """A server's own count of what it does."""

    running: int
    """Requests that are being sampled."""
    waiting: int
    """Requests in its queue."""
    cache_used: float
    """Share of the key-value cache in use, 0 to 1."""
    preemptions: int
    """Requests thrown out of the cache since the server started."""
    prompt_tokens: int
    """Prompt tokens since the server started."""
    cached_tokens: int
    """Those of them that were found in the prefix cache."""
    sampled_tokens: int
    """Tokens sampled since the server started."""


class InferenceServer(ABC):
    """One server. Used from one event loop.

    Attributes:
        url: Base address, without a slash at the end.
        capabilities: Known once connected.
    """

    url: str
    capabilities: Capabilities

    @abstractmethod
    async def connect(self, *, deadline_s: float) -> None:
        """Wait until the server answers, check its version and features, and learn its capabilities.

        Raises:
            UsageError: a version or a setting that cannot work; says which one could.
            ServerLost: it does not answer within the deadline.
        """

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn, as `agentrl.policy.PolicyEngine.generate` promises. Cancelling the awaiting task aborts it.

        Raises:
            UsageError: no server like this one can serve it.
            ServerLost: the connection broke.
            EngineError: the server answered with an error.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> bool:
        """End a request early; `generate` returns what it has. ``False`` when no such request runs."""

    @abstractmethod
    async def pause(self) -> None:
        """Hold all requests; when this returns, nothing is sampled."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on. Requests that were held continue with the current weights and a cache computed from them."""

    @abstractmethod
    async def load_weights(self, folder: Path, version: int) -> None:
        """Read new weights while paused: a Hugging Face folder of safetensors that the server's machine can see.

        When this returns, nothing computed from the old weights is used again, and tokens are stamped `version`.

        Raises:
            EngineError: the server did not take them; it must not be used any more.
        """

    @abstractmethod
    async def weight_version(self) -> int:
        """Version of the weights that the server says it serves; 0 for those that it started with."""

    @abstractmethod
    async def load(self) -> ServerLoad:
        """Its load now.

        Raises:
            ServerLost: it does not answer.
        """

    @abstractmethod
    async def is_healthy(self, *, deadline_s: float) -> bool:
        """Whether it answers its health route in time."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections; the server goes on. Idempotent."""
