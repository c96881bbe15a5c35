"""Weights in runs of bytes of bounded size, for transports that send tensors."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.server import TensorLayout

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Some tensors of one number format, one after the other."""

    run: Tensor
    """Their bytes, uint8."""
    layout: TensorLayout

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names, and views of the bytes."""
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        sizes = [torch.Size(shape).numel() for shape in self.layout.shapes]
        flats = torch.split(self.run.view(dtype), sizes)
        for name, flat, shape in zip(self.layout.names, flats, self.layout.shapes, strict=True):
            yield name, flat.view(tuple(shape))

    def encoded(self) -> str:
        """Base64 of the pickled list of names and tensors."""
        # a pickled view carries the whole memory that it is a view of
        named = [(name, tensor.clone()) for name, tensor in self.tensors()]
        return base64.b64encode(pickle.dumps(named, protocol=pickle.HIGHEST_PROTOCOL)).decode("ascii")


def unpack(buckets: Sequence[Bucket]) -> dict[str, Tensor]:
    """All tensors in some buckets, by name."""
    return {name: tensor for bucket in buckets for name, tensor in bucket.tensors()}


@dataclass(slots=True)
class _Filling:
    """Tensors that will be one bucket."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    size: int = 0


def pack(weights: Mapping[str, Tensor], *, bucket_bytes: int, device: torch.device = CPU) -> list[Bucket]:
    """Copy tensors into buckets.

    Args:
        weights: Tensors by name; those that share memory are sent under each name.
        bucket_bytes: Most bytes of a bucket, unless one tensor has more.
        device: Of the buckets.
    """
    return [_packed(tensors, device) for tensors in _groups(weights, bucket_bytes)]


def _groups(weights: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    filling: dict[torch.dtype, _Filling] = {}
    for name, tensor in weights.items():
        current = filling.setdefault(tensor.dtype, _Filling())
        if current.tensors and current.size + tensor.nbytes > most:
            yield current.tensors
            current = filling[tensor.dtype] = _Filling()
        current.tensors[name] = tensor
        current.size += tensor.nbytes
    yield from (rest.tensors for rest in filling.values())


def _packed(tensors: Mapping[str, Tensor], device: torch.device) -> Bucket:
    values = list(tensors.values())
    run = torch.empty(sum(tensor.numel() for tensor in values), dtype=values[0].dtype, device=device)
    for place, tensor in zip(torch.split(run, [tensor.numel() for tensor in values]), values, strict=True):
        place.copy_(tensor.detach().reshape(-1))
    layout = TensorLayout(
        names=list(tensors),
        dtype=str(run.dtype).removeprefix("torch."),
        shapes=[list(tensor.shape) for tensor in values],
    )
    return Bucket(run=run.view(torch.uint8), layout=layout)
