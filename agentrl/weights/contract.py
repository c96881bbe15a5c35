"""Contracts of weight sync: weight source, transport, server group, and the sync that verifies what servers have."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from agentrl.engine import InferenceServer


class WeightSource(Protocol):
    """Trainer's side of weight sync."""

    def weights(self) -> Mapping[str, Any]:
        """The policy's tensors by parameter name, as they are now; they may change with the next optimizer step."""

    def token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        """Log-probability of each answer token after the prompt and the tokens before it, at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Result of a sync."""

    version: int
    """The version that the engine serves now."""
    transport_s: float
    verify_s: float
    probe_difference: float
    """Largest difference of a probe token's log-probability between engine and trainer."""
    servers: int = 0
    """Servers that were verified; 0 for an engine in this process."""
    bytes: int = 0
    """Of the weights, where they were copied."""
    prepare_s: float = 0.0
    """Seconds in which they were copied or written while the servers went on."""
    load_s: float = 0.0
    """Seconds in which the servers were held."""
    released_bytes: int | None = None
    """Memory of this process's GPU that sleeping servers had given back; ``None`` where servers do not sleep."""
    adapters: Mapping[str, float] = field(default_factory=dict)
    """`probe_difference` of each of several adapters."""

    @property
    def seconds(self) -> float:
        """The whole sync."""
        return self.transport_s + self.verify_s


class WeightSync(ABC):
    """Weight sync of a run, from the trainer to the engine."""

    @abstractmethod
    async def sync(self, version: int) -> SyncReport:
        """Serve the trainer's current weights as `version`, and verify them.

        The trainer must not change them meanwhile.

        Raises:
            TrainingError: the engine's log-probabilities are not the trainer's.
            EngineError: the engine did not take the weights.
        """

    @abstractmethod
    async def verify(self) -> float:
        """Compare engine and trainer as they are, and return the largest difference; raises as `sync`."""

    async def release_memory(self) -> None:
        """Let the engine give its memory to the trainer until the next sync."""
        return

    async def close(self) -> None:
        """Release what it holds, while the engine still serves. Idempotent."""
        return


class PreparedWeights(ABC):
    """Weights of one version, of `size` bytes, apart from the trainer's tensors."""

    def __init__(self, *, version: int, size: int, seconds: float) -> None:
        self.version = version
        self.size = size
        self.seconds = seconds

    @abstractmethod
    async def give_to(self, server: InferenceServer) -> None:
        """Give them to a paused server, or raise `EngineError`; may run for several servers at once."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors by name."""

    async def discard(self) -> None:
        """Release them."""
        return


class Transport(ABC):
    """Transport of weights to servers: `prepare` takes a snapshot, which `give_to` sends to each server."""

    @abstractmethod
    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> PreparedWeights:
        """Set weights apart, so that the trainer may change its tensors; raises `TrainingError` if there is no room."""

    async def close(self) -> None:
        """Release what it holds. Idempotent."""
        return


Action: TypeAlias = Callable[[InferenceServer], Awaitable[object]]
Deliver: TypeAlias = Callable[[Mapping[str, Any] | None, int], Awaitable[object]]


class ServerGroup(Protocol):
    """Servers that have the same weights."""

    changing: asyncio.Lock
    """Held while weights change, and while a server comes back."""
    version: int
    """Of the weights that every server that takes part samples with."""
    is_paused: bool

    @property
    def servers(self) -> Sequence[InferenceServer]:
        """The servers that take part now."""

    async def pause(self) -> None:
        """Hold all requests; a server that cannot is taken out."""

    async def resume(self) -> None:
        """Go on; a server that cannot is taken out."""

    async def each(self, action: Action, *, what: str, deadline_s: float) -> None:
        """Do something on every server at once; those that fail are taken out. Raises what stops training."""

    async def change(self, action: Action, *, what: str, deadline_s: float) -> None:
        """`each`, for what keeps a server too busy to answer anything else."""

    def publish(self, version: int) -> None:
        """Record the version that all servers have now."""

    def remove(self, server: InferenceServer, why: object) -> None:
        """Take a server out until it has been given the current weights again."""

    def connect_sync(self, *, deliver: Deliver, bring_up_to_date: Action) -> None:
        """Register how weights reach all servers, and one that comes back."""

    async def wait_for_server(self, *, deadline_s: float) -> None:
        """Wait until a server takes part; raises `EngineError` when none will."""
