"""Settings of a cluster: placement and resources of a run's ranks, engines and environments."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, field_validator

from agentrl.config.section import Section

RAY_ADDRESS = re.compile(r"auto|(ray://)?[^\s/:]+:\d+")


def _checked_resources(resources: dict[str, float]) -> dict[str, float]:
    """Return the resources if Ray accepts them.

    Raises:
        ValueError: no resources; or an amount that is negative, or above 1 and not whole.
    """
    if not any(resources.values()):
        raise ValueError("no resources: write at least one, such as {CPU: 1}")
    for name, amount in resources.items():
        if name in ("cpu", "gpu"):
            raise ValueError(f"{name} is written {name.upper()}")
        if amount < 0 or (amount > 1 and amount != int(amount)):
            raise ValueError(f"{amount:g} {name} cannot be reserved: write a whole number, or a share below 1")
    return resources


Resources: TypeAlias = Annotated[dict[str, float], AfterValidator(_checked_resources)]
"""Amounts by name: CPU, GPU, and custom resources of the cluster."""


class ClusterConfig(Section):
    """Ranks, engines and environments as actors on the nodes of a cluster (extra ``agentrl[ray]``)."""

    type: Literal["ray"] = "ray"
    """Cluster framework."""
    address: str | None = None
    """Address of a running cluster: ``auto`` for the one on this machine, ``HOST:PORT``, or ``ray://HOST:PORT`` from
    outside the cluster. If not set, a cluster is started on this machine and stopped with the run."""
    rank: Resources | None = None
    """Resources of each rank: ``{CPU: 4, GPU: 1}`` and custom resources of the cluster. If not set, one CPU, and one
    GPU where the cluster has GPUs and ``model.device`` is not ``cpu``. Rank 0 is this process; its resources are
    reserved on its node."""
    engine: Resources | None = None
    """Resources of each engine. If not set, one CPU, and on clusters with GPUs also one GPU (``engine.tensor_parallel``
    for a server)."""
    engines: int = Field(1, ge=1)
    """Number of engines for ``engine: local``, each an actor with a copy of the model; for servers set
    ``engine.replicas``."""
    environments: int = Field(0, ge=0, le=1024)
    """Number of actors for environments and for the sandboxes of tools, spread over the nodes, each with
    ``environment.workers`` worker processes; 0 to run them on this machine."""
    environment: Resources | None = None
    """Resources of each of these actors. If not set, one CPU."""
    strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """Placement of ranks and engines: on as few nodes as possible (``pack``) or as many as possible (``spread``); the
    strict strategies fail instead of approximating."""
    timeout_s: float = Field(300.0, gt=0)
    """Seconds for connecting, for the placement, and for the start of the actors."""

    @field_validator("address")
    @classmethod
    def _address_is_one(cls, address: str | None) -> str | None:
        if address is not None and not RAY_ADDRESS.fullmatch(address):
            raise ValueError(f"{address} is not a cluster address: write auto, HOST:PORT or ray://HOST:PORT")
        return address
