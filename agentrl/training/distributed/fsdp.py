"""A model in shards (FSDP2): each rank holds a part of every parameter, and a layer is whole only while it computes.

A model is loaded straight into shards: no rank ever holds more of it than its shards and one layer.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import torch
from safetensors import safe_open
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from agentrl.config.trainer import FSDPOptions
from agentrl.models.load import load_model, make_model
from agentrl.training.distributed.group import Ranks
from agentrl.training.distributed.tensor_parallel import check_tensor_parallel, share_layer

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_WITHIN = "agentrl_within_forward"
_COMPUTES_IN = "agentrl_computes_in"


class Sharder:
    """Shards modules in float32, the layers first and the whole model last, over the mesh of all ranks."""

    def __init__(self, mesh: DeviceMesh, *, dtype: Literal["float32", "bfloat16"], options: FSDPOptions) -> None:
        short = dtype == "bfloat16"
        names = mesh.mesh_dim_names or ()
        self._tensor = mesh["tensor"] if "tensor" in names else None
        self._options: dict[str, Any] = {
            "mesh": mesh[("replicate", "shard") if "replicate" in names else "shard"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if short
            else MixedPrecisionPolicy(),
            "offload_policy": CPUOffloadPolicy() if options.offload else OffloadPolicy(),
        }
        self._reshard, self._dtype = options.reshard, getattr(torch, dtype)

    def shard_layer(self, layer: nn.Module) -> None:
        """Shard one layer, whose parameters are there."""
        if self._tensor is not None:
            share_layer(layer, self._tensor)
        fully_shard(layer, **self._options, reshard_after_forward=self._reshard)

    def shard_root(self, model: PreTrainedModel, device: torch.device) -> None:
        """Shard what is left of a model, and make gradients sums over ranks.

        Losses are weighted over the whole optimizer step, wherever their tokens are.
        """
        fully_shard(model, **self._options)
        for module in sharded_modules(model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True, recurse=False)  # images and experts that one rank only reads
        setattr(model, _COMPUTES_IN, self._dtype)
        setattr(model, _WITHIN, MethodType(_apply, model))
        register_fsdp_forward_method(model, _WITHIN)
        # shards may wait in the CPU's memory: what a model reads must go to where it computes
        type(model).device = property(lambda self: device)


def _apply(model: PreTrainedModel, read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return read(model, *arguments, **options)


def within_forward(
    model: PreTrainedModel,
    read: Callable[Concatenate[PreTrainedModel, Arguments], Result],
    *arguments: Arguments.args,
    **options: Arguments.kwargs,
) -> Result:
    """Read a model where its embedding, last norm and head are whole: inside what counts as its forward pass."""
    return cast("Result", getattr(model, _WITHIN, MethodType(_apply, model))(read, *arguments, **options))


def computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """Number format in which a model computes: that of its parameters, where it is not in shards."""
    return cast("torch.dtype", getattr(model, _COMPUTES_IN, model.dtype))


def layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The layers of a model's language part, in order; not those that see images, which not every pass runs."""
    text = getattr(model.base_model, "language_model", model.base_model)
    for child in text.children():
        if isinstance(child, nn.ModuleList):
            yield from child


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The parts of a model that are sharded on their own; none where it is whole."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Give up what was gathered for a forward pass without a backward pass: the next update would make it old."""
    for module in sharded_modules(model):
        module.reshard()


def add_up_gradients(model: nn.Module, *, over_ranks: bool) -> None:
    """Let the next backward pass add gradients up over the ranks, or on this rank only for the time being."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(over_ranks)


def whole(tensor: Tensor) -> Tensor:
    """A tensor of a model in one piece; all ranks must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return True if a rank has a part of it only."""
    return isinstance(tensor, DTensor)


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """The ranks over which a tensor is sharded."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def total_norm(tensors: Sequence[Tensor]) -> float:
    """Norm of all tensors together; those that other ranks have parts of are counted once. All ranks must ask."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        by_mesh.setdefault(mesh_of(tensor), []).append(tensor)
    norms = [float(whole(nn.utils.get_total_norm(part))) for part in by_mesh.values()]
    return norms[0] if len(norms) == 1 else math.hypot(*norms)


def sharded_like(tensor: Tensor, other: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has, sharded as another one is."""
    if not isinstance(other, DTensor):
        return tensor
    local = tensor.to(other.device)
    return distribute_tensor(local, other.device_mesh, other.placements, src_data_rank=None)


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
    """
    with _parameters_without_memory():
        model = make(path)
    if ranks.tensor_parallel > 1:
        check_tensor_parallel(model, ranks.tensor_parallel)
    sharder = Sharder(ranks.mesh(device, replicas=options.replicas), dtype=dtype, options=options)
    aliases = _aliases(model)
    read = _source(path, model, aliases, device, ranks, load=lambda: load(path, dtype))
    adapt(model)
    for layer in layers(model):
        _fill(layer, read, aliases, dtype, device)
        sharder.shard_layer(layer)
    _fill(model, read, aliases, dtype, device)
    for buffer_owner in model.modules():
        for name, buffer in buffer_owner.named_buffers(recurse=False):
            buffer_owner._buffers[name] = buffer.to(device)
    sharder.shard_root(model, device)
    return model


_Read = Callable[[list[str], Tensor], Tensor]
"""Gives the tensor that has one of the names and the shape of another; all ranks read in the same order."""


def _source(
    path: str | Path,
    model: PreTrainedModel,
    aliases: Mapping[int, list[str]],
    device: torch.device,
    ranks: Ranks,
    *,
    load: Callable[[], PreTrainedModel],
) -> _Read:
    """Read from the files in a folder; where these lack a tensor, rank 0 loads the whole model and sends it."""
    places = _places(Path(path))
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    fits = all(_holds(places, names, parameters[key].shape) for key, names in aliases.items())
    if all(ranks.collect([fits])):
        return functools.partial(_read_file, places)
    tensors = load().state_dict() if ranks.rank == 0 else None

    def sent(names: list[str], like: Tensor) -> Tensor:
        tensor = torch.empty(like.shape, dtype=torch.float32, device=device)
        if tensors is not None:
            tensor.copy_(tensors[names[0]])
        distributed.broadcast(tensor, src=0)
        return tensor

    return sent


def _read_file(places: Mapping[str, Path], names: list[str], like: Tensor) -> Tensor:
    name = next(name for name in names if name in places)
    with safe_open(places[name], framework="pt") as file:
        found: Tensor = file.get_tensor(name)
    return found


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


def _fill(module: nn.Module, read: _Read, aliases: Mapping[int, list[str]], dtype: Dtype, device: torch.device) -> None:
    """Give the parameters of a module that have no memory yet their values, in float32."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            if id(parameter) not in made:
                values = read(aliases[id(parameter)], parameter).to(device, getattr(torch, dtype))
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
