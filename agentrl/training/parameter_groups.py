"""Which optimizer updates which parameters: AdamW all of them, or Muon the matrices of a model's blocks.

Muon (https://kellerjordan.github.io/posts/muon/) updates matrices by orthogonalised momentum, scaled to the size of
AdamW's updates, so that one learning rate serves both (https://arxiv.org/abs/2502.16982). Embeddings, the output head
and vectors stay with AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from agentrl.errors import TrainingError
from agentrl.training.optimizer_settings import OptimizerSettings
from agentrl.training.ranks.muon import ShardedMuon
from agentrl.training.ranks.sharding import is_sharded, mesh_of


def make_optimizers(
    model: nn.Module, masters: Mapping[str, torch.Tensor], settings: OptimizerSettings
) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name; Muon's first, AdamW for what is left.

    Args:
        model: Says which matrices are in its blocks.
        masters: The tensors to update, by the names of the model's parameters.
        settings: Numbers.

    Raises:
        TrainingError: Muon is asked for, and there is no matrix for it.
    """
    taken = _block_matrices(model) if settings.optimizer == "muon" else frozenset[str]()
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if taken:
        optimizers["muon"] = _muon([master for name, master in masters.items() if name in taken], settings)
    if left := [master for name, master in masters.items() if name not in taken]:
        optimizers["adamw"] = torch.optim.AdamW(
            _groups(left, settings.weight_decay), lr=settings.learning_rate, betas=settings.betas, fused=True
        )
    return optimizers


def _muon(matrices: Sequence[torch.Tensor], settings: OptimizerSettings) -> torch.optim.Optimizer:
    learning_rate, weight_decay = settings.learning_rate, settings.weight_decay
    if is_sharded(matrices[0]):
        return ShardedMuon(matrices, lr=learning_rate, weight_decay=weight_decay)
    return torch.optim.Muon(matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")


def _block_matrices(model: nn.Module) -> frozenset[str]:
    """Names of the trained matrices inside the model's lists of blocks.

    Raises:
        TrainingError: there are none.
    """
    names = frozenset(
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for name, p in module.named_parameters()
        if p.requires_grad and p.ndim == 2
    )
    if not names:
        raise TrainingError(
            "the model has no matrices for Muon", expected="blocks in a ModuleList", hint="set trainer.optimizer=adamw"
        )
    return names


def _groups(tensors: Sequence[torch.Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices, vectors; those that are sharded over other ranks on their own, as they cannot be updated at once."""
    kinds: dict[tuple[bool, Any], list[torch.Tensor]] = {}
    for tensor in sorted(tensors, key=lambda tensor: tensor.ndim <= 1):
        kinds.setdefault((tensor.ndim > 1, mesh_of(tensor)), []).append(tensor)
    return [
        {"params": params, "weight_decay": weight_decay if is_matrix else 0.0}
        for (is_matrix, _), params in kinds.items()
    ]
