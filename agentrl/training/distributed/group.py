"""The ranks of a trainer: who there is, what they say to each other, and what rank 0 asks of the others."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.errors import AgentRLError, ConfigError, TrainingError
from agentrl.training.distributed.context_parallel import ContextGroup

T = TypeVar("T")

COLLECTIVE_TIMEOUT_S = 600.0
"""Seconds after which a collective gives up: all ranks do the same work, so that none is late for long."""
PATIENCE = timedelta(days=365)
"""How long a rank waits for the next call: rollouts take their time, and a rank 0 that has died is noticed at once."""


@dataclass(frozen=True, slots=True)
class RankCall:
    """Call that rank 0 makes on the others."""

    name: str
    arguments: tuple[Any, ...]


class Ranks:
    """This process among the ranks of a trainer; without arguments, one that is alone.

    `control` is a gloo group for calls and small objects, and `background` another one for threads that run during
    training; `explain` says which rank is lost, once a call has failed.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        count: int = 1,
        control: distributed.ProcessGroup | None = None,
        background: distributed.ProcessGroup | None = None,
        explain: Callable[[], TrainingError | None] = lambda: None,
    ) -> None:
        self.rank, self.count, self.control, self.background = rank, count, control, background
        self.context: ContextGroup | None = None
        """Those that share rows with this one, where rows are shared."""
        self.tensor_parallel = self._together = 1
        self._explain = explain
        self._calling = threading.Lock()  # a server that comes back may be probed while the trainer trains

    @property
    def are_many(self) -> bool:
        """True if the model is in shards."""
        return self.count > 1

    @property
    def dp_size(self) -> int:
        """Number of data-parallel groups: the ranks of a group compute the same micro-batch together."""
        return self.count // self._together

    @property
    def dp_rank(self) -> int:
        """Number of this rank's data-parallel group."""
        return self.rank // self._together

    @property
    def is_dp_leader(self) -> bool:
        """True if this rank tells what its data-parallel group has found."""
        return self.rank % self._together == 0

    def arrange(self, *, context: int, tensor: int) -> None:
        """Make data-parallel groups, whose ranks compute micro-batches together; all ranks must.

        `context` ranks share the tokens of a row, and `tensor` neighbours the matrices of a layer.
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
            group, _ = make_groups(sharing)
            self.context = ContextGroup(group, self.rank % self._together // tensor, context)

    def device(self, asked: str) -> torch.device:
        """Choose the device on which this rank computes, by ``model.device``.

        Raises:
            ConfigError: fewer GPUs than ranks on this machine, or one GPU for all of them.
        """
        if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
            return torch.device("cpu")
        if asked not in ("auto", "cuda"):
            raise ConfigError(
                "model.device names one device for several ranks",
                got=asked,
                expected="auto, cpu or cuda: every rank takes the GPU of its number",
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
        """The ranks as rows of shards: parameters are sharded within a row, and each row holds all of them.

        With tensor parallelism, neighbours hold parts of the same shards, and the mesh has one dimension more.
        """
        whole = self.count // self.tensor_parallel
        if whole % replicas:
            raise ConfigError(
                "trainer.fsdp.replicas must divide the number of ranks that hold no part of the same shard",
                got=replicas,
                expected=f"a divisor of {whole}",
            )
        sizes = {"replicate": replicas, "shard": whole // replicas, "tensor": self.tensor_parallel}
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))

    @contextmanager
    def broadcast_call(self, name: str, *arguments: Any) -> Iterator[None]:
        """Broadcast a call to the other ranks, which do the block's work, too; on these nothing is broadcast.

        Raises:
            TrainingError: a rank was lost meanwhile.
        """
        if self.count == 1 or self.rank:
            yield
            return
        with self._calling:
            try:
                self._broadcast(RankCall(name, arguments))
                yield
            except (AgentRLError, OSError):  # says more than what it did to other ranks
                raise
            except Exception as error:
                raise self._explain() or TrainingError(
                    f"the ranks of the trainer failed in {name}", got=f"{type(error).__name__}: {error}"
                ) from error

    def receive(self) -> RankCall | None:
        """Wait for the next call of rank 0; ``None`` at the end."""
        return self._broadcast(None)

    def dismiss(self) -> None:
        """Tell the other ranks that this was all."""
        with self._calling:
            self._broadcast(None)

    def _broadcast(self, call: RankCall | None) -> RankCall | None:
        told: list[RankCall | None] = [call]
        distributed.broadcast_object_list(told, src=0, group=self.control)
        return told[0]

    def collect(self, own: Sequence[T]) -> list[T]:
        """Collect what all ranks have, in the order of ranks."""
        if not self.are_many:
            return list(own)
        found: list[Sequence[T]] = [[]] * self.count
        distributed.all_gather_object(found, own, group=self.control)
        return [item for items in found for item in items]

    def filled(self, values: torch.Tensor) -> torch.Tensor:
        """Numbers that each rank knows a part of, NaN where it does not: the same on all ranks."""
        if not self.are_many:
            return values
        known = torch.where(values.isnan(), -math.inf, values)
        distributed.all_reduce(known, distributed.ReduceOp.MAX)
        return torch.where(known == -math.inf, math.nan, known)


def join(
    store: TCPStore | None,
    *,
    rank: int,
    count: int,
    explain: Callable[[], TrainingError | None] = lambda: None,
) -> Ranks:
    """Meet the other ranks at a store, the launcher's (torchrun) when left out; to be left again with `leave`."""
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=rank if store is not None else -1,
        world_size=count if store is not None else -1,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    control, background = (distributed.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2))
    return Ranks(rank=rank, count=count, control=control, background=background, explain=explain)


def leave() -> None:
    """Forget the other ranks."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
