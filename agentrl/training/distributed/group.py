"""The ranks of a trainer: process groups, collectives, and the calls that rank 0 broadcasts."""

from __future__ import annotations

import math
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.errors import AgentRLError, ConfigError, TrainingError, UsageError
from agentrl.training.distributed.context_parallel import ContextGroup

T = TypeVar("T")

COLLECTIVE_TIMEOUT_S = 600.0
"""Timeout of collectives in seconds; all ranks do equal work, so none should lag behind for long."""
_INTERFACES = "GLOO_SOCKET_IFNAME"
"""Environment variable with the network interfaces that gloo uses, separated by commas."""
PATIENCE = timedelta(days=365)
"""Timeout of waiting for the next call. It is long, because rollouts are, and a dead rank 0 is noticed anyway."""


@dataclass(frozen=True, slots=True)
class RankCall:
    """A call that rank 0 makes on the other ranks."""

    name: str
    arguments: tuple[Any, ...]


class RankConnections:
    """Connections of this process to the other ranks, which gloo opens with every group."""

    def __init__(self) -> None:
        self._inodes: set[int] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the connections that are opened in the block."""
        before = _open_sockets()
        yield
        self._inodes |= _open_sockets().keys() - before.keys()

    def shut_down(self) -> None:
        """Shut down the connections. Collectives with a rank that does not answer then fail, instead of waiting."""
        for inode, descriptor in _open_sockets().items():
            if inode in self._inodes:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.getpeername()  # fails for a listener, without which gloo ends the process
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> dict[int, int]:
    """Return the descriptors of this process's sockets, by inode; none where there is no ``/proc``."""
    found: dict[int, int] = {}
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile
                status = os.stat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(name)
    return found


class Ranks:
    """Ranks of a trainer from the view of this process; the defaults describe a single process.

    `explain` is called after a call has failed, and returns the error of the lost rank, if any.
    """

    def __init__(
        self, *, rank: int = 0, count: int = 1, explain: Callable[[], TrainingError | None] = lambda: None
    ) -> None:
        self.rank, self.count = rank, count
        self.control: distributed.ProcessGroup | None = None
        """Gloo group for calls and small objects."""
        self.background: distributed.ProcessGroup | None = None
        """Gloo group for threads that run during training."""
        self.connections = RankConnections()
        self.context: ContextGroup | None = None
        """Ranks that share rows with this one; ``None`` without context parallelism."""
        self.tensor_parallel = self._together = 1
        self._explain = explain
        self._calling = threading.Lock()  # threads may call, e.g. to probe a returning server during training

    @property
    def is_distributed(self) -> bool:
        """True if there are several ranks, which hold the model in shards."""
        return self.count > 1

    @property
    def dp_size(self) -> int:
        """Number of data-parallel groups; the ranks of a group compute a micro-batch together."""
        return self.count // self._together

    @property
    def dp_rank(self) -> int:
        """Number of this rank's data-parallel group."""
        return self.rank // self._together

    @property
    def is_dp_leader(self) -> bool:
        """True if this rank reports the results of its data-parallel group."""
        return self.rank % self._together == 0

    def arrange(self, *, context: int, tensor: int) -> None:
        """Make data-parallel groups, whose ranks compute micro-batches together; all ranks must call this.

        `context` ranks share the tokens of a row, and `tensor` ranks the matrices of a layer.

        Raises:
            ConfigError: the ranks cannot be divided into such groups.
        """
        if self.count % (context * tensor):
            raise ConfigError(
                "trainer.context_parallel times trainer.tensor_parallel must divide the number of ranks",
                got=f"{context} times {tensor}",
                expected=f"a divisor of {self.count}",
            )
        self.tensor_parallel, self._together, self.context = tensor, context * tensor, None
        if context > 1:
            sharing = [
                [team * self._together + part * tensor + neighbour for part in range(context)]
                for team in range(self.dp_size)
                for neighbour in range(tensor)
            ]
            make_groups: Any = distributed.new_subgroups_by_enumeration
            with self.connections.recording():
                group, _ = make_groups(sharing)
            self.context = ContextGroup(group, self.rank % self._together // tensor, context)

    def device(self, asked: str) -> torch.device:
        """Choose this rank's device from the value of ``model.device``.

        Raises:
            ConfigError: this machine has fewer GPUs than ranks, or `asked` names a single GPU.
        """
        if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        if asked not in ("auto", "cuda"):
            raise ConfigError(
                "model.device names one device for several ranks",
                got=asked,
                expected="auto, cpu or cuda: each rank uses the GPU with its local rank number",
            )
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.count))
        if here > torch.cuda.device_count():
            raise ConfigError(
                "there are more ranks than GPUs",
                got=f"{torch.cuda.device_count()} GPUs on the machine of rank {self.rank}",
                expected=f"at least {here}",
                hint="lower trainer.processes",
            )
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))

    def mesh(self, device: torch.device, *, replicas: int) -> DeviceMesh:
        """Arrange the ranks as `replicas` rows; parameters are sharded within a row, and each row holds all of them.

        With tensor parallelism, the mesh has another dimension, along which ranks hold parts of the same shard.

        Raises:
            ConfigError: the ranks cannot be divided into that many rows.
        """
        whole = self.count // self.tensor_parallel
        if whole % replicas:
            raise ConfigError(
                "trainer.fsdp.replicas must divide trainer.processes / trainer.tensor_parallel",
                got=replicas,
                expected=f"a divisor of {whole}",
            )
        sizes = {"replicate": replicas, "shard": whole // replicas, "tensor": self.tensor_parallel}
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        with self.connections.recording():
            return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))

    @contextmanager
    def broadcast_call(self, name: str, *arguments: Any) -> Iterator[None]:
        """Broadcast a call from rank 0 to the other ranks, which then run the same code as this block.

        On other ranks, and with a single rank, nothing is broadcast.

        Raises:
            TrainingError: a rank was lost during the block.
        """
        if self.count == 1 or self.rank:
            yield
            return
        with self._calling:
            try:
                self._broadcast(RankCall(name, arguments))
                yield
            except (AgentRLError, OSError):  # the cause; failures of other ranks follow from it
                raise
            except Exception as error:
                raise self._explain() or TrainingError(
                    f"the ranks of the trainer failed in {name}", got=f"{type(error).__name__}: {error}"
                ) from error

    def next_call(self) -> RankCall | None:
        """Wait for the next call of rank 0; return ``None`` after `shutdown`."""
        return self._broadcast(None)

    def shutdown(self) -> None:
        """Let the other ranks leave `next_call` for good."""
        with self._calling:
            self._broadcast(None)

    def _broadcast(self, call: RankCall | None) -> RankCall | None:
        calls: list[RankCall | None] = [call]
        distributed.broadcast_object_list(calls, src=0, group=self.control)
        return calls[0]

    def collect(self, own: Sequence[T]) -> list[T]:
        """Gather the items of all ranks, in the order of ranks."""
        if not self.is_distributed:
            return list(own)
        found: list[Sequence[T]] = [[]] * self.count
        distributed.all_gather_object(found, own, group=self.control)
        return [item for items in found for item in items]

    def fill_missing(self, values: torch.Tensor) -> torch.Tensor:
        """Merge values of which each rank knows a part and has NaN elsewhere; all ranks get the result."""
        if not self.is_distributed:
            return values
        known = torch.where(values.isnan(), -math.inf, values)
        distributed.all_reduce(known, distributed.ReduceOp.MAX)
        return torch.where(known == -math.inf, math.nan, known)


def join(
    store: TCPStore | None, *, rank: int, count: int, explain: Callable[[], TrainingError | None] = lambda: None
) -> Ranks:
    """Join the process group of all ranks through `store`, or through the launcher's (torchrun); see `leave`.

    Raises:
        UsageError: ``GLOO_SOCKET_IFNAME`` names a network interface that this machine does not have.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    for name in os.environ.get(_INTERFACES, "").split(","):
        if name and name not in interfaces:
            raise UsageError(
                f"{_INTERFACES} names a network interface that this machine does not have",
                got=name,
                expected=", ".join(interfaces),
                hint="unset the variable, or set it to the interface through which the ranks reach each other",
            )
    ranks = Ranks(rank=rank, count=count, explain=explain)
    with ranks.connections.recording():
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=store,
            rank=rank if store is not None else -1,
            world_size=count if store is not None else -1,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        ranks.control, ranks.background = (distributed.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2))
    return ranks


def leave() -> None:
    """Leave the process group."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
