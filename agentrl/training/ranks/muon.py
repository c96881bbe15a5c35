"""Muon for a model in shards: momentum stays in shards, and each matrix is orthogonalised by one rank, its owner.

    shards of matrices 0 1 2 … ─► all-to-all ─► rank i has matrix i whole ─► Newton-Schulz ─► all-to-all ─► shards

So many matrices as there are ranks go at once, one for each; none is computed twice, but by rows of ranks that hold the
whole model each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

_MOMENTUM = "momentum_buffer"
"""As torch.optim.Muon calls it, so that one process reads what several have written."""


class ShardedMuon(torch.optim.Optimizer):
    """What torch.optim.Muon computes with ``adjust_lr_fn="match_rms_adamw"``, for matrices sharded by rows.

    Args:
        matrices: DTensors, sharded over the last dimension of one mesh.
        lr: Learning rate.
        weight_decay: Of the matrices.
        momentum: Decay of the gradients' mean, with Nesterov's look ahead.
    """

    def __init__(
        self, matrices: Iterable[Tensor], *, lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the matrices that have a gradient."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            for batch in _batches(matrices):
                self._update(batch, group)

    def _update(self, matrices: list[DTensor], group: dict[str, Any]) -> None:
        directions = [self._direction(matrix, group["momentum"]) for matrix in matrices]
        for matrix, change in zip(matrices, _changes(matrices, directions, group["lr"]), strict=True):
            local = matrix.to_local()
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(change)

    def _direction(self, matrix: DTensor, momentum: float) -> Tensor:
        """This rank's rows of what is to be orthogonalised."""
        state, gradient = self.state[matrix], matrix.grad
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(matrix)
        assert isinstance(gradient, DTensor)
        own = state[_MOMENTUM].to_local()
        own.lerp_(gradient.to_local(), 1 - momentum)
        return gradient.to_local().lerp(own, momentum)


def _batches(matrices: list[DTensor]) -> Iterable[list[DTensor]]:
    """Matrices of similar size, one for each rank of a row."""
    if not matrices:
        return
    ranks = matrices[0].device_mesh.size(matrices[0].device_mesh.ndim - 1)
    order = sorted(matrices, key=lambda matrix: -matrix.numel())
    for first in range(0, len(order), ranks):
        yield order[first : first + ranks]


def _changes(matrices: list[DTensor], directions: list[Tensor], learning_rate: float) -> list[Tensor]:
    """This rank's rows of the changes of the matrices: each is computed by the rank of its number."""
    mesh = matrices[0].device_mesh
    group, last = mesh.get_group(mesh.ndim - 1), mesh.ndim - 1
    ranks, rank = mesh.size(last), mesh.get_local_rank(last)
    shares = [_rows(matrix.shape[0], ranks) for matrix in matrices]
    device, dtype = directions[0].device, directions[0].dtype
    sent = [direction.numel() for direction in directions] + [0] * (ranks - len(matrices))
    taken = [0] * ranks
    if rank < len(matrices):
        taken = [rows * matrices[rank].shape[1] for rows in shares[rank]]
    room = torch.empty(sum(taken), device=device, dtype=dtype)
    distributed.all_to_all_single(
        room, torch.cat([direction.flatten() for direction in directions]), taken, sent, group=group
    )
    if rank < len(matrices):
        room = _orthogonal_step(room.view(matrices[rank].shape), learning_rate).flatten()
    found = torch.empty(sum(sent), device=device, dtype=dtype)
    distributed.all_to_all_single(found, room, sent, taken, group=group)
    parts = zip(torch.split(found, sent[: len(matrices)]), directions, strict=True)
    return [part.view(direction.shape) for part, direction in parts]


def _rows(rows: int, ranks: int) -> list[int]:
    """How many rows each rank has: shards are of equal size, but for the last ones."""
    size = -(-rows // ranks)
    bounds = [min(rank * size, rows) for rank in range(ranks + 1)]
    return [high - low for low, high in itertools.pairwise(bounds)]


def _orthogonal_step(direction: Tensor, learning_rate: float) -> Tensor:
    """The change of a whole matrix: torch's Muon without momentum, applied to zeros."""
    change = torch.zeros_like(direction)
    change.grad = direction
    muon: Any = torch.optim.Muon(
        [change], lr=learning_rate, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    )
    muon.step()
    return change
