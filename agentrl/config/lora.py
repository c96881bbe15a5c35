"""Low-rank adapters: how a large model is trained through a few small matrices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config.section import Section


class LoraConfig(Section):
    """Adapters (LoRA) beside frozen weights; needs the extra ``agentrl[lora]``."""

    rank: int = Field(16, ge=1)
    """Rank of the update of each matrix."""
    alpha: float | None = Field(None, gt=0)
    """The update is scaled by ``alpha / rank``; twice the rank when left out."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that a warm start (`agentrl sft`) drops; training by reward has none."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Ends of the names of matrices that get an adapter (``q_proj``); ``all-linear``: all but the output head."""
    whole: list[str] = Field(default_factory=list)
    """Ends of the names of modules that are trained themselves, such as ``embed_tokens``; a KL to the reference then
    needs a copy of the model."""
    quantize: Literal["nf4"] | None = None
    """Keep the frozen weights in 4 bits (QLoRA): needs a GPU and the package bitsandbytes."""

    @property
    def scale(self) -> float:
        """What the product of an adapter's matrices is multiplied by."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank
