"""What a run asks of a cluster: one bundle of resources for each rank and each engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.config.cluster import ClusterConfig
from agentrl.config.engines import LocalEngineConfig, ServerEngineConfig
from agentrl.config.schema import Config

HEAD = "rank 0"
"""The rank that is the process of the run."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources of one node, for one rank or one engine."""

    name: str
    """``rank 1``, ``server-0``: as messages call it."""
    resources: Mapping[str, float]

    @property
    def in_words(self) -> str:
        """``CPU 2, GPU 1``."""
        return ", ".join(f"{name} {amount:g}" for name, amount in self.resources.items()) or "nothing"


def rank_bundles(config: Config, section: ClusterConfig, *, gpus: bool) -> list[Bundle]:
    """One for each rank.

    Args:
        config: The run.
        section: Its cluster.
        gpus: Whether there are some.
    """
    on_gpus = gpus and config.model.device != "cpu"
    resources = section.rank if section.rank is not None else _default(1 if on_gpus else 0)
    return [Bundle(f"rank {rank}", resources) for rank in range(config.trainer.processes)]


def engine_bundles(config: Config, section: ClusterConfig, *, gpus: bool) -> list[Bundle]:
    """One for each engine that is started; none for servers that run already."""
    engine = config.engine
    count, each = 0, 0
    if isinstance(engine, LocalEngineConfig):
        count, each = section.engines, 0 if config.model.device == "cpu" else 1
    elif isinstance(engine, ServerEngineConfig) and engine.servers == "launch":
        count, each = engine.replicas, engine.tensor_parallel
    resources = section.engine if section.engine is not None else _default(each if gpus else 0)
    return [Bundle(f"server-{number}", resources) for number in range(count)]


def _default(gpus: int) -> dict[str, float]:
    return {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}
