"""A cluster of machines: where a run's ranks and engines are placed, and with what resources."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, field_validator

from agentrl.config.section import Section

RAY_ADDRESS = re.compile(r"auto|(ray://)?[^\s/:]+:\d+")


def _checked_resources(resources: dict[str, float]) -> dict[str, float]:
    """Resources as Ray takes them.

    Raises:
        ValueError: an amount that is negative, or above 1 and not whole.
    """
    if not any(resources.values()):
        raise ValueError("no resources: write some, as {CPU: 1}")
    for name, amount in resources.items():
        if name in ("cpu", "gpu"):
            raise ValueError(f"{name} is written {name.upper()}")
        if amount < 0 or (amount > 1 and amount != int(amount)):
            raise ValueError(f"{amount:g} {name} cannot be had: write a whole number, or a share below 1")
    return resources


Resources: TypeAlias = Annotated[dict[str, float], AfterValidator(_checked_resources)]
"""Amounts by name: CPU, GPU, and names of the cluster's own."""


class ClusterConfig(Section):
    """Ranks and engines as actors on the nodes of a cluster (extra ``agentrl[ray]``); this process stays the run's."""

    type: Literal["ray"] = "ray"
    """What keeps the cluster."""
    address: str | None = None
    """A running cluster: ``auto`` for that of this machine, ``HOST:PORT``, or ``ray://HOST:PORT`` from outside it; one
    is started here, and ended with the run, when left out."""
    rank: Resources | None = None
    """Resources of each rank, as ``{CPU: 4, GPU: 1}``, and the cluster's own names; one CPU when left out, and a GPU
    where there are some and ``model.device`` is not ``cpu``. Rank 0 is this process, and has them on its node."""
    engine: Resources | None = None
    """Resources of each engine; one CPU when left out, and where there are GPUs one, or ``engine.tensor_parallel``."""
    engines: int = Field(1, ge=1)
    """Engines of ``engine: local``, each an actor with a copy of the model; servers are counted by
    ``engine.replicas``."""
    strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """How ranks and engines lie: on few nodes or on many; strictly, or as far as it goes."""
    timeout_s: float = Field(300.0, gt=0)
    """Deadline of the connection, of the placement, and of the start of actors."""

    @field_validator("address")
    @classmethod
    def _address_is_one(cls, address: str | None) -> str | None:
        if address is not None and not RAY_ADDRESS.fullmatch(address):
            raise ValueError(f"{address} is no address of a cluster: write auto, HOST:PORT or ray://HOST:PORT")
        return address
