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
    total = 0
    written: list[list[str]] = []
    for shard in _shards(weights, shard_bytes):  # one at a time: tensors may be gathered as they are read
        save_file(_separate(shard), folder / _unnumbered(len(written)), metadata={"format": "pt"})
        written.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    names = [f"model-{number:05d}-of-{len(written):05d}.safetensors" for number in range(1, len(written) + 1)]
    if len(written) == 1:
        names = ["model.safetensors"]
    for number, name in enumerate(names):
        (folder / _unnumbered(number)).rename(folder / name)
    if len(written) > 1:
        places = {tensor: name for name, tensors in zip(names, written, strict=True) for tensor in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return total


def _unnumbered(number: int) -> str:
    """A file's name while nobody knows how many there will be."""
    return f"shard-{number:05d}.partial"


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
