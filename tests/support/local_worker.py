"""How a server inside this process receives weights that are sent to it: the other end of the trainer's transports."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Sequence

import torch

from agentrl.engine import Broadcast, TensorLayout, TensorPart
from agentrl.errors import EngineError
from agentrl.weights.collective import GroupMember


async def decode_parts(parts: Sequence[TensorPart]) -> dict[str, torch.Tensor]:
    """The tensors that come in requests."""
    return {name: tensor for part in parts for name, tensor in pickle.loads(base64.b64decode(await part()))}


class LocalWorker(GroupMember):
    """The only worker of a server, rank 1 of the groups that it joins."""

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
            bucket, _ = await asyncio.gather(self.receive_bucket(layout), broadcast(number))
            tensors |= dict(bucket.tensors())
        return tensors
