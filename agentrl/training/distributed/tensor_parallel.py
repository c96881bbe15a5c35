"""Tensor parallelism: neighbours hold columns of a layer's first matrices, rows of its last, and add up what they find.

    hidden states ─► q, k, v (own heads) ─► attention ─► o (own rows) ─► sum over ranks
    hidden states ─► gate, up (own columns) ─────────► down (own rows) ─► sum over ranks

Norms, embedding and head are whole on each of the neighbours, and sharded over the other ranks as ever.
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
"""Norms that see the own heads only, [rows, tokens, heads, size]: their gradients are added up."""
_HEADS_DIMENSION = 2
ADAPTER = "default"


def check_tensor_parallel(model: PreTrainedModel, ranks: int) -> None:
    """Refuse what cannot be shared so."""
    config = model.config
    if config.model_type not in FAMILIES:
        raise UsageError(
            "this model cannot be trained with trainer.tensor_parallel",
            got=f"model type {config.model_type}",
            expected=f"one of {', '.join(FAMILIES)}",
            hint="trainer.processes alone shards any model",
        )
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "intermediate size": config.intermediate_size,
    }
    if uneven := {name: size for name, size in sizes.items() if size % ranks}:
        raise UsageError(
            "the model cannot be shared evenly by trainer.tensor_parallel",
            got=", ".join(f"{name} {size}" for name, size in uneven.items()) + f", {ranks} ranks",
            expected="a divisor of each",
        )


def share_layer(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each rank its part of a layer, whose parameters are whole and the same on all ranks of the mesh.

    Adapters are cut, too: of the two factors that they add, A by its rows, which are its rank, beside columns of a
    matrix, and by its columns beside rows; B as the matrix is, and by its columns.
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
        parameter.requires_grad_(trained[name])  # torch begins anew with norms


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
