"""How a model is sharded over ranks: one config key, with a few words in it."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FSDPOptions:
    """Memory against communication; only with several ranks."""

    replicas: Annotated[int, Field(ge=1)] = 1
    """Rows of ranks that hold the whole model each: with 2 machines of 8 GPUs, 2 keeps parameters within a machine."""
    reshard: bool = True
    """Give a layer's parameters up between forward and backward pass: less memory, one more gathering."""
    offload: bool = False
    """Keep shards, gradients and the optimizer's moments in the CPU's memory, and update there."""
    reduce: bool = False
    """Add gradients up over the ranks after every micro-batch, instead of once per update: this keeps no whole
    gradients, at the price of communication."""
