"""How a server inside this process receives weights that are sent to it: the other end of the trainer's transports."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from agentrl.errors import EngineError
from agentrl.server import Broadcast, TensorLayout, TensorPart, UpdateGroup
from agentrl.weights.buckets import Bucket
from agentrl.weights.daemon_thread import in_thread
from agentrl.weights.process_group import c10d, make_group


async def decode_parts(parts: Sequence[TensorPart]) -> dict[str, torch.Tensor]:
    """The tensors that come in requests."""
    return {name: tensor for part in parts for name, tensor in pickle.loads(base64.b64decode(await part()))}


class LocalWorker:
    """The only worker of a server, rank 1 of the groups that it joins."""

    def __init__(self) -> None:
        self._group: Any = None

    async def join(self, group: UpdateGroup) -> None:
        """Meet the trainer."""
        self._group = await in_thread(lambda: _joined(group))

    def leave(self) -> None:
        """Close the connections to the trainer, as a process that ends does."""
        self._group = None

    async def receive(
        self, layouts: Sequence[TensorLayout], broadcast: Broadcast, *, hears: int | None
    ) -> dict[str, torch.Tensor]:
        """The tensors that are broadcast.

        Args:
            layouts: What comes.
            broadcast: The trainer's part.
            hears: After so many runs it listens no more; ``None``: it hears all.

        Raises:
            EngineError: the broadcast broke off.
        """
        tensors: dict[str, torch.Tensor] = {}
        for number, layout in enumerate(layouts):
            if number == hears:
                await broadcast(number)
                raise EngineError("a run was sent that nobody heard")
            bucket = _empty(layout)
            await asyncio.gather(broadcast(number), in_thread(partial(self._hear, bucket.run)))
            tensors |= dict(bucket.tensors())
        return tensors

    def _hear(self, run: torch.Tensor) -> None:
        try:
            self._group.broadcast(run, 0).wait()
        except RuntimeError as error:
            raise EngineError("the broadcast broke off", got=str(error)) from error


def _joined(group: UpdateGroup) -> Any:
    store = c10d.TCPStore(group.address, group.port, group.size, False, timedelta(seconds=group.timeout_s))
    return make_group(group, store, rank=1)


def _empty(layout: TensorLayout) -> Bucket:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    count = sum(torch.Size(shape).numel() for shape in layout.shapes)
    return Bucket(run=torch.empty(count * dtype.itemsize, dtype=torch.uint8), layout=layout)
