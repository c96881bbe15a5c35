"""Loading a model straight into shards: no rank ever holds more of it than its shards and one layer.

    files ──► every rank reads one layer ──► shards it ──► forgets the rest ──► the next layer

Where the files do not hold the model's own tensors (names of an older version of the model, another format), rank 0
loads it into the CPU's memory and sends the others one tensor at a time.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from agentrl.config.fsdp import FSDPOptions
from agentrl.training.models.loading import load_model, make_model
from agentrl.training.ranks.group import Ranks
from agentrl.training.ranks.sharding import Sharder, layers
from agentrl.training.ranks.tensor import check_tensor_parallel

Dtype = Literal["float32", "bfloat16"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def _loaded(path: str | Path, dtype: Dtype) -> PreTrainedModel:
    return load_model(path, dtype=dtype, device="cpu")


def load_sharded(
    path: str | Path,
    *,
    dtype: Dtype,
    device: torch.device,
    ranks: Ranks,
    options: FSDPOptions,
    adapt: Callable[[PreTrainedModel], None] = lambda model: None,
    make: Callable[[str | Path], PreTrainedModel] = make_model,
    load: Callable[[str | Path, Dtype], PreTrainedModel] = _loaded,
) -> PreTrainedModel:
    """A model in float32 shards that computes in `dtype`; all ranks must ask for it.

    Args:
        path: A folder, or a name on the Hugging Face hub.
        dtype: Number format of the weights; those of the files are rounded to it.
        device: Of this rank.
        ranks: Share the model.
        options: How.
        adapt: Changes the whole model, whose parameters have no memory yet; what it adds has.
        make: Makes the model, whatever its values; a causal language model when left out.
        load: Loads the same model into the CPU's memory, for rank 0 to send, where the files lack some of its tensors.

    Raises:
        UsageError: as `agentrl.training.models.loading.load_model`.
    """
    with _parameters_without_memory():
        model = make(path)
    if ranks.tensor_parallel > 1:
        check_tensor_parallel(model, ranks.tensor_parallel)
    sharder = Sharder(ranks.mesh(device, replicas=options.replicas), dtype=dtype, options=options)
    aliases = _aliases(model)
    source = _source(path, model, aliases, device, ranks, load=lambda: load(path, dtype))
    adapt(model)
    for layer in layers(model):
        _fill(layer, source, aliases, dtype, device)
        sharder.shard_layer(layer)
    _fill(model, source, aliases, dtype, device)
    for buffer_owner in model.modules():
        for name, buffer in buffer_owner.named_buffers(recurse=False):
            buffer_owner._buffers[name] = buffer.to(device)
    sharder.shard_root(model, device)
    return model


class _Source(ABC):
    """Where tensors come from, one at a time and in the same order on all ranks."""

    @abstractmethod
    def read(self, names: list[str], like: Tensor) -> Tensor:
        """The tensor that has one of the names, in any number format and on any device."""


class _Files(_Source):
    """Safetensors in a folder.

    Args:
        places: The file of each tensor.
    """

    def __init__(self, places: Mapping[str, Path]) -> None:
        self._places = places

    def read(self, names: list[str], like: Tensor) -> Tensor:
        """Read it from its file."""
        name = next(name for name in names if name in self._places)
        with safe_open(self._places[name], framework="pt") as file:
            found: Tensor = file.get_tensor(name)
        return found


class _RankZero(_Source):
    """A whole model that rank 0 has, and sends."""

    def __init__(self, model: PreTrainedModel | None, device: torch.device) -> None:
        self._tensors = None if model is None else model.state_dict()
        self._device = device

    def read(self, names: list[str], like: Tensor) -> Tensor:
        """Send it to, or receive it on, every rank."""
        sent = torch.empty(like.shape, dtype=torch.float32, device=self._device)
        if self._tensors is not None:
            sent.copy_(self._tensors[names[0]])
        distributed.broadcast(sent, src=0)
        return sent


def _source(
    path: str | Path,
    model: PreTrainedModel,
    aliases: Mapping[int, list[str]],
    device: torch.device,
    ranks: Ranks,
    *,
    load: Callable[[], PreTrainedModel],
) -> _Source:
    places = _places(Path(path))
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    fits = all(_holds(places, names, parameters[key].shape) for key, names in aliases.items())
    if all(ranks.collect([fits])):
        return _Files(places)
    return _RankZero(load() if ranks.rank == 0 else None, device)


def _places(folder: Path) -> dict[str, Path]:
    """The safetensors file of each tensor in a folder."""
    if (folder / INDEX).is_file():
        found: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in found.items()}
    if not (folder / SINGLE).is_file():
        return {}
    with safe_open(folder / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / SINGLE)


def _holds(places: Mapping[str, Path], names: list[str], shape: torch.Size) -> bool:
    name = next((name for name in names if name in places), None)
    if name is None:
        return False
    with safe_open(places[name], framework="pt") as file:
        return bool(tuple(file.get_slice(name).get_shape()) == tuple(shape))


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter: two, for an embedding that is the head."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def _fill(
    module: nn.Module, source: _Source, aliases: Mapping[int, list[str]], dtype: Dtype, device: torch.device
) -> None:
    """Give the parameters of a module that have no memory yet their values, in float32."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            if id(parameter) not in made:
                values = source.read(aliases[id(parameter)], parameter).to(device, getattr(torch, dtype))
                made[id(parameter)] = nn.Parameter(values.float(), requires_grad=parameter.requires_grad)
            owner.register_parameter(name, made[id(parameter)])


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Inside the block new parameters have shapes only; buffers, which are computed and not loaded, are real."""
    register = nn.Module.register_parameter

    def register_shape(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_shape  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
