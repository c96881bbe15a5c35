"""A model in shards (FSDP2): each rank holds a part of every parameter, and a layer is whole only while it computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
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

from agentrl.config.fsdp import FSDPOptions
from agentrl.training.ranks.tensor import share_layer

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_WITHIN = "agentrl_within_forward"
_COMPUTES_IN = "agentrl_computes_in"


class Sharder:
    """Shards modules, the layers first and the whole model last.

    Args:
        mesh: Of all ranks; parameters are sharded over ``shard``, and, with ``tensor``, those of layers over both.
        dtype: In which layers compute; shards are float32, and so are sums of gradients.
        options: Memory against communication.
    """

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

        Args:
            model: Its layers are in shards.
            device: Where it computes.
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
    """Read a model where its embedding, last norm and head are whole: inside what counts as its forward pass.

    Args:
        model: In shards or not.
        read: Gives tensors, or tuples of them.
        arguments: For `read`, after the model.
        options: For `read`.
    """
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
    """Whether the next backward pass adds gradients up over the ranks, or on this rank only for the time being."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(over_ranks)


def whole(tensor: Tensor) -> Tensor:
    """A tensor of a model in one piece; all ranks must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a rank has a part of it only."""
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
