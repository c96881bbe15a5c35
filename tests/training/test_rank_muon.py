"""Muon over ranks: matrices in shards are updated as whole ones are."""

import copy

import pytest
import torch
from ranks_here import in_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from agentrl.training.distributed.fsdp import whole
from agentrl.training.optimizer import OptimizerSettings, PolicyOptimizer

SETTINGS = OptimizerSettings(learning_rate=0.01, total_updates=3, optimizer="muon", weight_decay=0.1, max_grad_norm=1e9)
SHAPES = [(5, 8), (8, 3), (1, 4), (6, 6), (2, 9)]
"""Rows that do not divide, and fewer rows than ranks."""


class Blocks(nn.Module):
    """Matrices in blocks, which Muon takes, and some that it leaves to AdamW."""

    def __init__(self):
        super().__init__()
        numbers = torch.Generator().manual_seed(3)
        self.embedding = nn.Parameter(torch.randn(7, 4, generator=numbers))
        self.blocks = nn.ModuleList(nn.Linear(columns, rows) for rows, columns in SHAPES)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=numbers)


def gradients(update):
    numbers = torch.Generator().manual_seed(100 + update)
    return [torch.randn(parameter.shape, generator=numbers) for parameter in Blocks().parameters()]


def trained(model, updates=3):
    """The weights and the optimizer's state after some updates, whole."""
    optimizer = PolicyOptimizer(model, SETTINGS)
    for update in range(updates):
        for parameter, gradient in zip(model.parameters(), gradients(update), strict=True):
            parameter.grad = gradient
            if hasattr(parameter, "device_mesh"):
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.grad = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        optimizer.update()
    state = {name: whole(value).clone() for name, value in optimizer.named_state().items()}
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}, state


@pytest.mark.parametrize(("count", "rows"), [(2, 1), (4, 2)])
@pytest.mark.slow
def test_matrices_in_shards_are_updated_as_whole_ones(count, rows):
    def work(ranks):
        model, shape = Blocks(), (count,) if rows == 1 else (rows, count // rows)
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return trained(model)

    weights, state = in_ranks(count, work)
    expected, expected_state = trained(Blocks())
    assert sorted(weights) == sorted(expected)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-7, msg=name)
        assert not torch.equal(value, dict(Blocks().named_parameters())[name])
    assert sorted(state) == sorted(expected_state)
    moved = [name for name in state if name.startswith("muon/")]
    assert len(moved) == len(SHAPES)
    for name in moved:
        torch.testing.assert_close(state[name], expected_state[name], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_matrices_that_neighbours_cut_are_updated_as_whole_ones(monkeypatch):
    """By rows and by columns in turn, and shards whose rows do not divide; one that nobody cuts."""
    monkeypatch.setattr(f"{__name__}.SHAPES", [(6, 8), (8, 4), (2, 4), (4, 6), (10, 2), (5, 3)])

    def work(ranks):
        model = Blocks()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        for number, block in enumerate(model.blocks):
            style = RowwiseParallel(input_layouts=Replicate()) if number % 2 else ColwiseParallel()
            if number < 5:
                parallelize_module(block, mesh["tensor"], style, src_data_rank=None)
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        return trained(model)

    weights, state = in_ranks(4, work)
    expected, expected_state = trained(Blocks())
    assert sorted(weights) == sorted(expected)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-7, msg=name)
    moved = [name for name in expected_state if name.startswith("muon/")]
    assert len(moved) == 6
    for name in moved:
        torch.testing.assert_close(state[name], expected_state[name], rtol=1e-6, atol=1e-7, msg=name)


def test_a_matrix_without_a_gradient_stays_as_it_is():
    def work(ranks):
        model = copy.deepcopy(Blocks())
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = PolicyOptimizer(model, SETTINGS)
        model.embedding.grad = torch.ones_like(model.embedding)
        optimizer.update()
        return whole(model.blocks[0].weight.detach()), whole(model.embedding.detach())

    matrix, embedding = in_ranks(2, work)
    assert torch.equal(matrix, Blocks().blocks[0].weight)
    assert not torch.equal(embedding, Blocks().embedding)
