"""A member of the trainer's process group that is no server's worker: it hears buckets of weights."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch

from agentrl.errors import EngineError
from agentrl.server import TensorLayout, UpdateGroup
from agentrl.weights.buckets import CPU, Bucket
from agentrl.weights.daemon_thread import in_thread
from agentrl.weights.process_group import c10d, make_group


class GroupMember:
    """Rank 1 of the group that it joins; over NCCL on its first GPU."""

    def __init__(self) -> None:
        self._group: Any = None
        self._device = CPU

    async def join(self, group: UpdateGroup) -> None:
        """Meet the trainer.

        Raises:
            EngineError: it did not come.
        """
        try:
            self._group = await in_thread(partial(_joined, group))
        except RuntimeError as error:
            raise EngineError("the trainer's group was not joined", got=str(error)) from error
        self._device = torch.device("cuda", torch.cuda.current_device()) if group.backend == "nccl" else CPU

    def leave(self) -> None:
        """Close the connections to the trainer."""
        self._group = None

    async def hear(self, layout: TensorLayout) -> Bucket:
        """The tensors that are broadcast next.

        Args:
            layout: What comes.

        Raises:
            EngineError: the broadcast broke off.
        """
        bucket = _empty(layout, self._device)
        await in_thread(partial(self._hear, bucket.run))
        return bucket

    def _hear(self, run: torch.Tensor) -> None:
        try:
            self._group.broadcast(run, 0).wait()
        except RuntimeError as error:
            raise EngineError("the broadcast broke off", got=str(error)) from error


def _joined(group: UpdateGroup) -> Any:
    store = c10d.TCPStore(group.address, group.port, group.size, False, timedelta(seconds=group.timeout_s))
    return make_group(group, store, rank=1)


def _empty(layout: TensorLayout, device: torch.device) -> Bucket:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    count = sum(torch.Size(shape).numel() for shape in layout.shapes)
    return Bucket(run=torch.empty(count * dtype.itemsize, dtype=torch.uint8, device=device), layout=layout)
