"""Sharded models (FSDP2): each rank holds a part of every parameter, and gathers a layer only while it computes.

A model is loaded directly into shards: no rank ever holds more of it than its shards and one layer.

With tensor parallelism, ranks hold columns of a layer's first matrices and rows of its last ones, and add up outputs:

    hidden states ─► q, k, v (own heads) ─► attention ─► o (own rows) ─► sum over ranks
    hidden states ─► gate, up (own columns) ─────────► down (own rows) ─► sum over ranks

Norms, embedding and head are whole on each tensor-parallel rank, and sharded over the other ranks as usual.
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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from agentrl.config.trainer import FSDPOptions
from agentrl.errors import UsageError
from agentrl.models.load import load_model, make_model
from agentrl.training.distributed.group import Ranks

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_WITHIN = "agentrl_within_forward"
_COMPUTES_IN = "agentrl_computes_in"
Dtype = Literal["float32", "bfloat16"]
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_Read = Callable[[list[str], Tensor], Tensor]
"""Function that reads the tensor with one of the names and the given tensor's shape; all ranks read in the same order.
"""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms of a rank's own heads, [rows, tokens, heads, size], whose gradients are added up over ranks."""
_HEADS_DIMENSION = 2
ADAPTER = "default"


class Sharder:
    """Sharding of a model in float32 over the mesh of all ranks: layers first, then the rest."""

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
        """Shard one layer, whose parameters must have values."""
        if self._tensor is not None:
            share_layer(layer, self._tensor)
        fully_shard(layer, **self._options, reshard_after_forward=self._reshard)

    def shard_root(self, model: PreTrainedModel, device: torch.device) -> None:
        """Shard the rest of a model, and let gradients be sums over ranks.

        They are not means, because losses are weighted over the whole optimizer step on all ranks.
        """
        fully_shard(model, **self._options)
        for module in sharded_modules(model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # some ranks may not use some parts, such as the vision part or an expert
            module.set_reduce_scatter_unused_params(True, recurse=False)
        setattr(model, _COMPUTES_IN, self._dtype)
        setattr(model, _WITHIN, MethodType(_apply, model))
        register_fsdp_forward_method(model, _WITHIN)
        # shards may be in the CPU's memory, but inputs must be on the device that computes
        type(model).device = property(lambda self: device)


def _apply(model: PreTrainedModel, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return function(model, *arguments, **options)


def within_forward(
    model: PreTrainedModel,
    function: Callable[Concatenate[PreTrainedModel, Arguments], Result],
    *arguments: Arguments.args,
    **options: Arguments.kwargs,
) -> Result:
    """Call a function as a forward pass of the model, so that its embedding, last norm and head are gathered."""
    return cast("Result", getattr(model, _WITHIN, MethodType(_apply, model))(function, *arguments, **options))


def computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the data type in which a model computes: for an unsharded model, that of its parameters."""
    return cast("torch.dtype", getattr(model, _COMPUTES_IN, model.dtype))


def layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the layers of a model's language part, in order; not vision layers, which not every pass runs."""
    text = getattr(model.base_model, "language_model", model.base_model)
    for child in text.children():
        if isinstance(child, nn.ModuleList):
            yield from child


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Iterate over the separately sharded modules of a model; an unsharded model has none."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Free parameters gathered for a forward pass without a backward pass; the next update would make them stale."""
    for module in sharded_modules(model):
        module.reshard()


def add_up_gradients(model: nn.Module, *, over_ranks: bool) -> None:
    """Choose if the next backward pass adds up gradients over ranks, or only accumulates them on this rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(over_ranks)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; for a sharded one, all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return True if a rank holds only a part of the tensor."""
    return isinstance(tensor, DTensor)


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Return the mesh over which a tensor is sharded, if it is."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def total_norm(tensors: Sequence[Tensor]) -> float:
    """Compute the norm of all tensors together, with sharded ones as a whole; all ranks must call this."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        by_mesh.setdefault(mesh_of(tensor), []).append(tensor)
    norms = [float(whole(nn.utils.get_total_norm(part))) for part in by_mesh.values()]
    return norms[0] if len(norms) == 1 else math.hypot(*norms)


def sharded_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Shard a tensor that every rank has like `other`; return it unchanged if `other` is not sharded."""
    if not isinstance(other, DTensor):
        return tensor
    local = tensor.to(other.device)
    return distribute_tensor(local, other.device_mesh, other.placements, src_data_rank=None)


def _load_on_cpu(path: str | Path, dtype: Dtype) -> PreTrainedModel:
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
    load: Callable[[str | Path, Dtype], PreTrainedModel] = _load_on_cpu,
) -> PreTrainedModel:
    """Load a model into float32 shards that computes in `dtype`; all ranks must call this.

    Args:
        path: Folder, or name on the Hugging Face hub.
        dtype: Data type to which the weights of the files are rounded.
        device: Device of this rank.
        ranks: Ranks that share the model.
        options: Options of the sharding.
        adapt: Function that changes the model before its parameters have values; parameters that it adds have values.
        make: Function that makes the model with any values; the default makes a causal language model.
        load: Function that loads the model into the CPU's memory. Rank 0 calls it to broadcast the weights if the files
            lack some of the tensors.
    """
    with _parameters_without_memory():
        model = make(path)
    if ranks.tensor_parallel > 1:
        check_tensor_parallel(model, ranks.tensor_parallel)
    sharder = Sharder(ranks.mesh(device, replicas=options.replicas), dtype=dtype, options=options)
    aliases = _aliases(model)
    read = _make_reader(path, model, aliases, device, ranks, load=lambda: load(path, dtype))
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


def _make_reader(
    path: str | Path,
    model: PreTrainedModel,
    aliases: Mapping[int, list[str]],
    device: torch.device,
    ranks: Ranks,
    *,
    load: Callable[[], PreTrainedModel],
) -> _Read:
    """Make a reader of the files in a folder; if these lack a tensor, rank 0 loads and broadcasts the whole model."""
    files = _tensor_files(Path(path))
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    fits = all(_holds(files, names, parameters[key].shape) for key, names in aliases.items())
    if all(ranks.collect([fits])):
        return functools.partial(_read_file, files)
    tensors = load().state_dict() if ranks.rank == 0 else None

    def broadcast(names: list[str], like: Tensor) -> Tensor:
        tensor = torch.empty(like.shape, dtype=torch.float32, device=device)
        if tensors is not None:
            tensor.copy_(tensors[names[0]])
        distributed.broadcast(tensor, src=0)
        return tensor

    return broadcast


def _read_file(files: Mapping[str, Path], names: list[str], like: Tensor) -> Tensor:
    name = next(name for name in names if name in files)
    with safe_open(files[name], framework="pt") as file:
        found: Tensor = file.get_tensor(name)
    return found


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Find the safetensors file of each tensor in a folder."""
    if (folder / INDEX).is_file():
        found: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in found.items()}
    if not (folder / SINGLE).is_file():
        return {}
    with safe_open(folder / SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / SINGLE)


def _holds(files: Mapping[str, Path], names: list[str], shape: torch.Size) -> bool:
    name = next((name for name in names if name in files), None)
    if name is None:
        return False
    with safe_open(files[name], framework="pt") as file:
        return bool(tuple(file.get_slice(name).get_shape()) == tuple(shape))


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    """Find all names of each parameter by its id: an embedding tied to the head has two."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def _fill(module: nn.Module, read: _Read, aliases: Mapping[int, list[str]], dtype: Dtype, device: torch.device) -> None:
    """Read the values of a module's parameters that have no memory yet, in float32."""
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
    """Make new parameters in this block without memory; buffers, which are computed and not loaded, have values."""
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


def check_tensor_parallel(model: PreTrainedModel, ranks: int) -> None:
    """Check that a model supports tensor parallelism over `ranks` ranks.

    Raises:
        UsageError: the model type is not supported, or a size is not divisible by `ranks`.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        raise UsageError(
            "this model cannot be trained with trainer.tensor_parallel",
            got=f"model type {config.model_type}",
            expected=f"one of {', '.join(FAMILIES)}",
            hint="trainer.processes without tensor_parallel shards any model",
        )
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "intermediate size": config.intermediate_size,
    }
    if uneven := {name: size for name, size in sizes.items() if size % ranks}:
        raise UsageError(
            "trainer.tensor_parallel must divide the sizes of the model",
            got=", ".join(f"{name} {size}" for name, size in uneven.items()) + f", {ranks} ranks",
            expected="a divisor of each size",
        )


def share_layer(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Reduce a layer to this rank's part; its parameters must be whole and equal on all ranks of the mesh.

    Adapters are divided, too. Next to a matrix divided by columns, factor A is divided by its rows (the adapter's rank)
    and B like the matrix; next to a matrix divided by rows, both factors are divided by their columns.
    """
    known = {name for name, _ in layer.named_modules()}
    styles: dict[str, ParallelStyle] = {
        name: SequenceParallel(sequence_dim=_HEADS_DIMENSION, use_local_output=True) for name in OF_HEADS
    }
    for name in COLUMNS:
        styles |= {name: ColwiseParallel()} if f"{name}.base_layer" not in known else _adapted_columns(name)
    for name in ROWS:
        styles |= {name: RowwiseParallel()} if f"{name}.base_layer" not in known else _adapted_rows(name)
    trained = {name: parameter.requires_grad for name, parameter in layer.named_parameters()}
    parallelize_module(
        layer, mesh, {name: style for name, style in styles.items() if name in known}, src_data_rank=None
    )
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(trained[name])  # torch replaces the norms' parameters


def _adapted_columns(name: str) -> dict[str, ParallelStyle]:
    return {
        f"{name}.base_layer": ColwiseParallel(),
        f"{name}.lora_A.{ADAPTER}": ColwiseParallel(output_layouts=Replicate()),
        f"{name}.lora_B.{ADAPTER}": ColwiseParallel(),
    }


def _adapted_rows(name: str) -> dict[str, ParallelStyle]:
    return {
        f"{name}.base_layer": RowwiseParallel(),
        f"{name}.lora_A.{ADAPTER}": RowwiseParallel(output_layouts=Shard(-1)),
        f"{name}.lora_B.{ADAPTER}": RowwiseParallel(),
    }
