"""Connection of a run to Ray: a running cluster or one started here, reserved resources, and gloo's interface."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, TypeVar

from agentrl.config.cluster import ClusterConfig
from agentrl.config.derived import HEAD, ResourceBundle
from agentrl.errors import AgentRLError, UsageError
from agentrl.registry import Extra

E = TypeVar("E", bound=AgentRLError)

RAY = Extra(name="ray", module="ray")
NODE_LABEL = "ray.io/node-id"
"""Label under which Ray stores the id of a node."""
RESERVATION_POLL_S = 1.0
LISTENS_S = 10.0
"""Timeout of the first connection to a Ray cluster."""
FROM_OUTSIDE = "ray://"
OWN_WAYS = {"kill_child_processes_on_worker_exit": False}
"""Ray settings: a server's guard must outlive its actor, because it ends the server's process tree."""
MAX_CALLS = 10_000
"""Maximum concurrent calls to an actor with an engine; the pool's own limits are lower."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """Node of the cluster."""

    id: str
    address: str

    def __str__(self) -> str:
        return f"node {self.address} ({self.id[:8]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlace:
    """Place of a rank, an engine or environments on a cluster."""

    bundle: ResourceBundle
    index: int
    """Index of the bundle in the placement group."""
    node: ClusterNode
    group: Any = field(repr=False)
    """Placement group of the bundle."""

    @property
    def name(self) -> str:
        """Name, such as ``rank 1``, ``server-0`` or ``environments-0``."""
        return self.bundle.name


class Cluster:
    """Resources that a run has reserved on a cluster until `close`.

    If it `leaves`, `close` disconnects from it.
    """

    def __init__(self, ray: ModuleType, section: ClusterConfig, *, leaves: bool) -> None:
        self.ray: Any = ray
        self.section = section
        self.places: dict[str, ClusterPlace] = {}
        self._leaves = leaves
        self._groups: list[Any] = []
        self._has_ended = threading.Event()

    @property
    def is_from_outside(self) -> bool:
        """True if this process does not run on a node of the cluster."""
        return (self.section.address or "").startswith(FROM_OUTSIDE)

    @property
    def has_gpus(self) -> bool:
        """True if a node has a GPU."""
        return any(resources.get("GPU") for resources in self._nodes().values())

    @property
    def own_node(self) -> ClusterNode:
        """Node of this process."""
        own = self.ray.get_runtime_context().get_node_id()
        return next(node for node in self._nodes() if node.id == own)

    def _nodes(self) -> dict[ClusterNode, Mapping[str, float]]:
        """Return the nodes that are alive, with their total resources."""
        return {
            ClusterNode(found["NodeID"], found["NodeManagerAddress"]): found["Resources"]
            for found in self.ray.nodes()
            if found["Alive"]
        }

    def reserve(self, bundles: Sequence[ResourceBundle], *, strategy: str, say: Callable[[str], None]) -> None:
        """Reserve the resources of all bundles at once, those of rank 0 on the node of this process.

        Args:
            bundles: Bundles to place together; rank 0 is skipped if this process is not on a node.
            strategy: Placement on few nodes or on many, as ``cluster.strategy``.
            say: Called with a message if the reservation has to wait.

        Raises:
            UsageError: the resources are not available in time.
        """
        wanted = [bundle for bundle in bundles if bundle.name != HEAD or not self.is_from_outside]
        if not wanted:
            return
        if too_large := [bundle.name for bundle in wanted if not self._fits(bundle)]:
            if self.section.address is None:
                raise self._no_room(wanted, strategy)
            say(f"no node of the cluster has the resources for {', '.join(too_large)}; waiting for one")
        own = "" if self.is_from_outside else self.own_node.id
        group = RAY.load("ray.util").placement_group(
            [dict(bundle.resources) for bundle in wanted],
            strategy=strategy.upper(),
            bundle_label_selector=[{NODE_LABEL: own} if bundle.name == HEAD else {} for bundle in wanted],
        )
        self._groups.append(group)
        until = time.monotonic() + self.section.timeout_s
        while not group.wait(RESERVATION_POLL_S):
            if self._has_ended.is_set() or time.monotonic() > until:
                raise self._no_room(wanted, strategy)
        for index, bundle in enumerate(wanted):
            found = self._bundle_node(group, index)
            if found is None:
                raise self._no_room(wanted, strategy)
            self.places[bundle.name] = ClusterPlace(bundle=bundle, index=index, node=found, group=group)

    def _bundle_node(self, group: Any, index: int) -> ClusterNode | None:
        """Return the node of a bundle; ``None`` while Ray reschedules a bundle of a lost node."""
        table = RAY.load("ray.util").placement_group_table(group)
        nodes = {node.id: node for node in self._nodes()}
        return nodes.get(table["bundles_to_node_id"].get(index)) if table["state"] == "CREATED" else None

    def find_place(self, place: ClusterPlace) -> ClusterPlace:
        """Wait until Ray has rescheduled a place from a lost node.

        Raises:
            UsageError: no node has had the resources in time.
        """
        until = time.monotonic() + self.section.timeout_s
        while (node := self._bundle_node(place.group, place.index)) is None:
            if self._has_ended.wait(RESERVATION_POLL_S) or time.monotonic() > until:
                raise self._no_room([place.bundle], self.section.strategy)
        self.places[place.name] = found = replace(place, node=node)
        return found

    def _fits(self, bundle: ResourceBundle) -> bool:
        nodes = self._nodes()
        if bundle.name == HEAD:
            nodes = {self.own_node: nodes[self.own_node]}
        return any(
            all(has.get(name, 0) >= amount for name, amount in bundle.resources.items()) for has in nodes.values()
        )

    def _no_room(self, wanted: Sequence[ResourceBundle], strategy: str) -> UsageError:
        on_own = f" on {self.own_node}, where this process runs" if wanted[0].name == HEAD else ""
        requested = [f"{bundle.name}: {bundle.in_words}" for bundle in wanted]
        requested[0] += on_own
        return UsageError(
            "the cluster does not have the resources for the run",
            got="; ".join(f"{node}: {_in_words(has)}" for node, has in self._nodes().items()),
            expected=f"{'; '.join(requested)} (strategy {strategy}), free within "
            f"{self.section.timeout_s:g} s (cluster.timeout_s)",
            hint="lower cluster.rank and cluster.engine, add nodes, or end other programs on them: ray status",
        )

    def actor(self, place: ClusterPlace, kind: type, *arguments: Any, calls: int = 1) -> Any:
        """Create an actor at a place; it may still be starting.

        `calls` is its maximum number of concurrent calls.
        """
        resources = dict(place.bundle.resources)
        strategies = RAY.load("ray.util.scheduling_strategies")
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": 0,
            "max_concurrency": calls,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                placement_group=place.group, placement_group_bundle_index=place.index
            ),
        }
        return self.ray.remote(kind).options(**options).remote(*arguments)

    def first_gpu(self, holder: Any) -> str:
        """Return the GPU of a `GpuReservation`."""
        name: str = self.ray.get(holder.gpu.remote(), timeout=self.section.timeout_s)
        return name

    def kill(self, actor: Any) -> None:
        """Kill an actor and its child processes, without waiting."""
        self.ray.kill(actor)

    def loss(
        self, place: ClusterPlace, what: str, error: BaseException | None, *, kind: type[E], hint: str | None = None
    ) -> E:
        """Return the error, of type `kind`, for an actor that exited unexpectedly, or whose node was lost."""
        alive = {node.id for node in self._nodes()}
        cause = f"{type(error).__name__}: {error}" if error is not None else "an unexpected exit"
        return kind(
            f"{what} was lost on {place.node}",
            got=f"{_shorten(cause)}" if place.node.id in alive else "a node that left the cluster",
            hint=hint,
        )

    def give_up(self) -> None:
        """Stop `reserve` and `find_place` in other threads."""
        self._has_ended.set()

    def close(self) -> None:
        """Release the resources and disconnect. This ends the actors, and a cluster that was started here."""
        groups, self._groups = self._groups, []
        for group in groups:
            with suppress(ConnectionError, self.ray.exceptions.RayError):  # the cluster may be lost
                RAY.load("ray.util").remove_placement_group(group)
        if self._leaves:
            self._leaves = False
            self.ray.shutdown()


def connect(section: ClusterConfig, *, cpus: float) -> Cluster:
    """Connect this process to a cluster. An existing connection is used, and kept on `Cluster.close`.

    Args:
        section: Section ``cluster`` of the config.
        cpus: Number of CPUs that the run will reserve. A cluster started here declares at least as many, as processes
            of one machine share its cores anyway.

    Raises:
        UsageError: Ray is not installed, or the cluster cannot be reached.
    """
    ray: Any = RAY.load()
    if ray.is_initialized():
        return Cluster(ray, section, leaves=False)
    logging.getLogger("ray").setLevel(logging.ERROR)  # its warnings repeat at every start
    quiet: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
    try:
        if section.address is None:
            count = max(os.cpu_count() or 1, int(cpus + 0.999))
            ray.init(address="local", num_cpus=count, include_dashboard=False, _system_config=OWN_WAYS, **quiet)
        else:
            _check_listener(section.address)
            ray.init(address=section.address, **quiet)
    except Exception as error:  # boundary of Ray, which raises arbitrary exceptions
        ray.shutdown()
        raise UsageError(
            "cannot connect to the cluster",
            got=_shorten(f"{type(error).__name__}: {error}"),
            expected="a new local cluster" if section.address is None else f"a running one at {section.address}",
            hint="start one (ray start --head) and set cluster.address, or remove cluster.address",
        ) from error
    return Cluster(ray, section, leaves=True)


def _check_listener(address: str) -> None:
    """Probe the address first, because Ray would retry for minutes.

    Raises:
        OSError: no process listens at the address.
    """
    if address != "auto":
        host, _, port = address.removeprefix(FROM_OUTSIDE).rpartition(":")
        socket.create_connection((host, int(port)), timeout=LISTENS_S).close()


SHOWN_CHARACTERS = 4000


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"…{text[-SHOWN_CHARACTERS:]}"


def _in_words(resources: Mapping[str, float]) -> str:
    shown = {
        name: amount
        for name, amount in resources.items()
        if "memory" not in name and not name.startswith(("node:", "accelerator_type:"))
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(shown.items())) or "nothing"


GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
GET_ADDRESS = 0x8915
"""SIOCGIFADDR of netdevice(7)."""
NAME_BYTES = 15
ADDRESS = slice(20, 24)
"""Position of the IPv4 address in the result of that call."""


def interface_of(address: str) -> str | None:
    """Return the name of the interface with an IPv4 address; ``None`` if this machine has no such address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, GET_ADDRESS, struct.pack("256s", name.encode()[:NAME_BYTES]))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[ADDRESS]) == address:
                return name
    return None


def gloo_variables(address: str) -> dict[str, str]:
    """Return the variables that bind gloo to an address of this machine instead of the loopback interface."""
    name = interface_of(address)
    return {} if name is None else {GLOO_INTERFACE: name}
