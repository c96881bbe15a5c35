"""Weights as files: a folder of safetensors that Hugging Face's loaders, vLLM and SGLang read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 2 << 30
"""A file holds at most so many bytes, or one tensor."""
INDEX = "model.safetensors.index.json"


def write_tensors(weights: Mapping[str, Tensor], folder: Path, *, shard_bytes: int = SHARD_BYTES) -> int:
    """Write tensors into an existing folder; the number of bytes in them.

    Tensors that share memory (the embedding and the output head of a tied model) are written under each name: a server
    that keeps two copies needs both.
    """
    shards = list(_shards(weights, shard_bytes))
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        save_file(_separate(shard), folder / name, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in weights.values())
    if len(shards) > 1:
        places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return total


def _shards(weights: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if shard and size + tensor.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in memory of their own, as the format needs them; only those that share some are copied."""
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage().data_ptr()
        owns_all = plain.untyped_storage().nbytes() == plain.nbytes
        separate[name] = plain if owns_all and storage not in seen else plain.clone()
        seen.add(storage)
    return separate
