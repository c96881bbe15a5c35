"""The contract of weight sync: the trainer's new weights reach the engine, and then that is proven."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class WeightSource(Protocol):
    """What sync needs from a trainer."""

    def weights(self) -> Mapping[str, Any]:
        """The policy's tensors by parameter name, as they are now; they may change with the next optimizer step."""

    def token_logprobs(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[float]:
        """Log-probability of each answer token after the prompt and the tokens before it, at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What a sync did."""

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
    """GPU memory that the servers had given back before it, as this process sees it on its GPU; ``None`` where servers
    do not sleep."""

    @property
    def seconds(self) -> float:
        """The whole sync."""
        return self.transport_s + self.verify_s


class WeightSync(ABC):
    """Brings weights from the trainer to the engine. One per run."""

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
        """Compare engine and trainer as they are; the largest difference found.

        Raises:
            TrainingError: they differ.
        """

    async def release_memory(self) -> None:
        """The engine is not needed before the next sync, and may give its memory to the trainer meanwhile.

        Raises:
            EngineError: no server could.
        """
        return

    async def close(self) -> None:
        """Release what it holds, while the engine still serves. Idempotent."""
        return
