"""Contracts of weight sync: weight source, transport, server group, and the sync with its verification."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from agentrl.engine import InferenceServer

Action: TypeAlias = Callable[[InferenceServer], Awaitable[object]]
Deliver: TypeAlias = Callable[[Mapping[str, Any] | None, int], Awaitable[object]]


class WeightSource(Protocol):
    """The trainer's side of weight sync."""

    def weights(self) -> Mapping[str, Any]:
        """Return the policy's current tensors by parameter name; the next optimizer step may change them."""

    def token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        """Compute the log-probability of each answer token after the prompt, at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Result of a sync."""

    version: int
    """Version that the engine serves after the sync."""
    transport_s: float
    """Seconds to prepare the weights and load them into the engine."""
    verify_s: float
    """Seconds to verify the engine."""
    probe_difference: float
    """Maximum difference of a probe token's log-probability between engine and trainer."""
    servers: int = 0
    """Number of verified servers; 0 for an engine in this process."""
    bytes: int = 0
    """Bytes of the copied weights; 0 if nothing was copied."""
    prepare_s: float = 0.0
    """Seconds to copy or write the weights, while the servers continued to serve."""
    load_s: float = 0.0
    """Seconds for which the servers were paused."""
    released_bytes: int | None = None
    """Bytes that sleeping servers had released on this process's GPU; ``None`` if servers do not sleep."""
    adapters: Mapping[str, float] = field(default_factory=dict)
    """`probe_difference` by adapter, if there are several."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole sync."""
        return self.transport_s + self.verify_s


class WeightSync(ABC):
    """Weight sync of a run, from the trainer to the engine."""

    @abstractmethod
    async def sync(self, version: int) -> SyncReport:
        """Serve the trainer's current weights as `version`, and verify them.

        The trainer must not change its weights during the sync.

        Raises:
            TrainingError: the engine's log-probabilities differ from the trainer's.
            EngineError: the engine did not load the weights.
        """

    @abstractmethod
    async def verify(self) -> float:
        """Compare engine and trainer without a sync; return the maximum difference. Raises the errors of `sync`."""

    async def release_memory(self) -> None:
        """Release the engine's GPU memory for the trainer until the next sync."""
        return

    async def close(self) -> None:
        """Release all resources, while the engine is still running. Idempotent."""
        return


class PreparedWeights(ABC):
    """Weights of one version, of `size` bytes, independent of the trainer's tensors."""

    def __init__(self, *, version: int, size: int, seconds: float) -> None:
        self.version = version
        self.size = size
        self.seconds = seconds

    @abstractmethod
    async def give_to(self, server: InferenceServer) -> None:
        """Send the weights to a paused server, or raise `EngineError`; may run concurrently for several servers."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors by name."""

    async def discard(self) -> None:
        """Release the weights."""
        return


class Transport(ABC):
    """Transport of weights to servers: `prepare` takes a snapshot, which `give_to` sends to each server."""

    @abstractmethod
    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> PreparedWeights:
        """Copy weights, so that the trainer may change its tensors; raises `TrainingError` if there is no space."""

    async def close(self) -> None:
        """Release all resources. Idempotent."""
        return


class ServerGroup(Protocol):
    """Servers with the same weights."""

    changing: asyncio.Lock
    """Lock to hold while weights change and while a lost server returns."""
    version: int
    """Version of the weights of all active servers."""
    is_paused: bool

    @property
    def servers(self) -> Sequence[InferenceServer]:
        """Active servers."""

    async def pause(self) -> None:
        """Pause all requests; a server that fails is removed."""

    async def resume(self) -> None:
        """Resume all requests; a server that fails is removed."""

    async def each(self, action: Action, *, what: str, deadline_s: float) -> None:
        """Run an action on all servers at once; servers that fail are removed. Raises errors that stop training."""

    async def change(self, action: Action, *, what: str, deadline_s: float) -> None:
        """Run an action like `each`; for actions that keep servers too busy to answer other requests."""

    def publish(self, version: int) -> None:
        """Record the version that all servers now have."""

    def remove(self, server: InferenceServer, why: object) -> None:
        """Remove a server until it has loaded the current weights again."""

    def connect_sync(self, *, deliver: Deliver, bring_up_to_date: Action) -> None:
        """Register the functions that send weights to all servers, and to a returning one."""

    async def wait_for_server(self, *, deadline_s: float) -> None:
        """Wait until a server is active; raises `EngineError` if none will be."""
