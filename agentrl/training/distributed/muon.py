"""Muon for sharded models: momentum stays sharded, and each matrix is orthogonalized by one rank, its owner.

    shards of matrices 0 1 2 … ─► all-to-all ─► rank i has matrix i whole ─► Newton-Schulz ─► all-to-all ─► shards

A batch has one matrix per rank, and no matrix is computed twice, except by replicas of the whole model. With tensor
parallelism, there are two exchanges in each direction: tensor-parallel ranks ("neighbours") first exchange their parts
of shards, so that each has whole shards of its share of the matrices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

TENSOR = "tensor"
"""Mesh dimension along which neighbours hold parts of a shard."""
_MOMENTUM = "momentum_buffer"
"""Name of the momentum in torch.optim.Muon, so that one process can read a state that several have written."""


class ShardedMuon(torch.optim.Optimizer):
    """Muon for sharded matrices, equal to torch.optim.Muon with ``adjust_lr_fn="match_rms_adamw"``.

    Args:
        matrices: DTensors, sharded by rows over the last dimension of a mesh, or over the second to last one if the
            last is ``tensor``.
        lr: Learning rate.
        weight_decay: Weight decay of the matrices.
        momentum: Decay of the gradients' mean, with Nesterov's lookahead.
    """

    def __init__(
        self, matrices: Iterable[Tensor], *, lr: float, weight_decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the matrices that have a gradient."""
        assert closure is None, "gradients must be computed before"
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
        """Update the momentum; return this rank's rows of the matrix to orthogonalize."""
        state, gradient = self.state[matrix], matrix.grad
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(matrix)
        assert isinstance(gradient, DTensor)
        own = state[_MOMENTUM].to_local()
        own.lerp_(gradient.to_local(), 1 - momentum)
        return gradient.to_local().lerp(own, momentum)


@dataclass(frozen=True, slots=True)
class _MeshLine:
    """Ranks along one dimension of a mesh; a single rank if matrices are not divided along it."""

    group: distributed.ProcessGroup | None = None
    ranks: int = 1
    rank: int = 0

    def exchange(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send each rank its flat part, and receive one from each rank, with these sizes."""
        if self.group is None:
            return list(parts)
        received = parts[0].new_empty(sum(sizes))
        sent = [part.numel() for part in parts]
        distributed.all_to_all_single(received, torch.cat(list(parts)), list(sizes), sent, group=self.group)
        return list(torch.split(received, list(sizes)))


def _batches(matrices: list[DTensor]) -> Iterable[list[DTensor]]:
    """Yield batches of matrices of similar size that are divided alike, one matrix per rank."""
    for cut in (False, True):
        order = sorted((m for m in matrices if _is_cut(m) == cut), key=lambda matrix: -matrix.numel())
        if order:
            shards, neighbours = _lines(order[0])
            at_once = shards.ranks * neighbours.ranks
            yield from (order[first : first + at_once] for first in range(0, len(order), at_once))


def _is_cut(matrix: DTensor) -> bool:
    """Return True if neighbours hold parts of the matrix's shards."""
    return TENSOR in (matrix.device_mesh.mesh_dim_names or ())


def _lines(matrix: DTensor) -> tuple[_MeshLine, _MeshLine]:
    """Return the ranks that hold shards of a matrix, and the neighbours that hold parts of the same shard."""
    mesh, cut = matrix.device_mesh, _is_cut(matrix)
    lines = [_MeshLine(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis)) for axis in range(mesh.ndim)]
    return (lines[-2], lines[-1]) if cut else (lines[-1], _MeshLine())


def _changes(matrices: list[DTensor], directions: list[Tensor], learning_rate: float) -> list[Tensor]:
    """Compute this rank's parts of the changes of the matrices.

    With T neighbours, matrix n is computed by rank n // T along the shards, among the neighbours n % T.
    """
    shards, neighbours = _lines(matrices[0])
    dealt = [range(first, len(matrices), neighbours.ranks) for first in range(neighbours.ranks)]
    mine = dealt[neighbours.rank]
    sent = [_flat([directions[number] for number in numbers], directions[0]) for numbers in dealt]
    own = sum(directions[number].numel() for number in mine)
    found = neighbours.exchange(sent, [own] * neighbours.ranks)
    parts = [torch.split(part, [directions[number].numel() for number in mine]) for part in found]
    whole_shards = [torch.stack(list(same)) for same in zip(*parts, strict=True)]
    changes = _shard_changes([matrices[number] for number in mine], whole_shards, shards, learning_rate, directions[0])
    back = [_flat([change[rank] for change in changes], directions[0]) for rank in range(neighbours.ranks)]
    found = neighbours.exchange(back, [part.numel() for part in sent])
    changed: dict[int, Tensor] = {}
    for numbers, part in zip(dealt, found, strict=True):
        sizes = [directions[number].numel() for number in numbers]
        changed |= dict(zip(numbers, torch.split(part, sizes), strict=True))
    return [changed[number].view(direction.shape) for number, direction in enumerate(directions)]


def _shard_changes(
    matrices: list[DTensor], own: list[Tensor], shards: _MeshLine, learning_rate: float, like: Tensor
) -> list[Tensor]:
    """Compute this rank's parts of the changes from whole shards: [neighbours, numbers of a part] each."""
    sizes = [part.numel() for part in own] + [0] * (shards.ranks - len(matrices))
    sent = [part.flatten() for part in own] + [like.new_empty(0)] * (shards.ranks - len(matrices))
    if shards.rank >= len(matrices):
        shards.exchange(sent, [0] * shards.ranks)
        back = [like.new_empty(0)] * shards.ranks
    else:
        matrix = matrices[shards.rank]
        division = _MatrixDivision.of(matrix, shards.ranks, own[0].shape[0])
        found = shards.exchange(sent, [rows * division.width * division.neighbours for rows in division.rows])
        change = _orthogonal_step(division.join(found), learning_rate)
        back = division.split(change)
    changes = shards.exchange(back, sizes)
    return [change.view(part.shape) for change, part in zip(changes, own, strict=False)]


@dataclass(frozen=True, slots=True)
class _MatrixDivision:
    """Division of a matrix: neighbours hold parts of it, and shards hold rows of each part."""

    neighbours: int
    side: int
    """Dimension that is divided among neighbours: 0 for rows, 1 for columns."""
    width: int
    """Number of columns of a part."""
    rows: list[int]
    """Number of rows of a part in each shard."""

    @classmethod
    def of(cls, matrix: DTensor, shards: int, neighbours: int) -> Self:
        """Derive the division from the matrix's placements."""
        cut: Any = matrix.placements[-1]
        side = cut.dim if neighbours > 1 else 0
        rows, columns = matrix.shape
        if side == 0:
            return cls(neighbours, side, columns, _rows(rows // neighbours, shards))
        return cls(neighbours, side, columns // neighbours, _rows(rows, shards))

    def join(self, shards: list[Tensor]) -> Tensor:
        """Join the matrix from the flat rows of all neighbours' parts in each shard."""
        parts = [shard.view(self.neighbours, rows, self.width) for shard, rows in zip(shards, self.rows, strict=True)]
        return torch.cat(list(torch.cat(parts, dim=1).unbind()), dim=self.side)

    def split(self, matrix: Tensor) -> list[Tensor]:
        """Split the matrix into the parts that `join` takes."""
        stacked = torch.stack(matrix.chunk(self.neighbours, dim=self.side))
        return [part.flatten() for part in torch.split(stacked, self.rows, dim=1)]


def _flat(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Concatenate the flattened tensors; the result may be empty."""
    return torch.cat([like.new_empty(0), *(tensor.flatten() for tensor in tensors)])


def _rows(rows: int, ranks: int) -> list[int]:
    """Compute the number of rows of each rank: shards have equal sizes, except for the last ones."""
    size = -(-rows // ranks)
    bounds = [min(rank * size, rows) for rank in range(ranks + 1)]
    return [high - low for low, high in itertools.pairwise(bounds)]


def _orthogonal_step(direction: Tensor, learning_rate: float) -> Tensor:
    """Compute the change of a whole matrix: torch's Muon without momentum, applied to zeros."""
    change = torch.zeros_like(direction)
    change.grad = direction
    muon: Any = torch.optim.Muon(
        [change], lr=learning_rate, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    )
    muon.step()
    return change
