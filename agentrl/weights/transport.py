"""The contract of a transport: how weights get from the trainer to servers.

prepare (episodes go on) ──► PreparedWeights ──► give_to, for each held server ──► discard, once newer ones are in use
                                     └─ also for a server that comes back later: the trainer's tensors may have changed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from agentrl.server import InferenceServer


class PreparedWeights(ABC):
    """Weights of one version, apart from the trainer's tensors.

    Args:
        version: What servers are to call them.
        size: Bytes.
        seconds: How long it took to prepare them.
    """

    def __init__(self, *, version: int, size: int, seconds: float) -> None:
        self.version = version
        self.size = size
        self.seconds = seconds

    @abstractmethod
    async def give_to(self, server: InferenceServer) -> None:
        """Let a paused server have them; several servers may be given them at the same time.

        Raises:
            EngineError: it did not take them.
        """

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """What servers are given, by name."""

    async def discard(self) -> None:
        """Nobody asks for them any more."""
        return


class Transport(ABC):
    """One per run."""

    @abstractmethod
    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> PreparedWeights:
        """Set weights apart, so that the trainer may change its tensors afterwards.

        Raises:
            TrainingError: no room for them.
        """

    async def close(self) -> None:
        """Release what it holds. Idempotent."""
        return
