"""Tensor parallelism: ranks hold columns of a layer's first matrices and rows of its last ones, and add up outputs.

    hidden states ─► q, k, v (own heads) ─► attention ─► o (own rows) ─► sum over ranks
    hidden states ─► gate, up (own columns) ─────────► down (own rows) ─► sum over ranks

Norms, embedding and head are whole on each tensor-parallel rank, and sharded over the other ranks as usual.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from agentrl.errors import UsageError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")
OF_HEADS = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms of a rank's own heads, [rows, tokens, heads, size], whose gradients are added up over ranks."""
_HEADS_DIMENSION = 2
ADAPTER = "default"


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
