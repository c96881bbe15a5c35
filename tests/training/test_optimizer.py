"""The optimizer: schedule, clipping, skipped updates, short number formats, state."""

import math

import pytest
import torch
from torch import nn

from agentrl.errors import TrainingError, UsageError
from agentrl.training.optimizer import OptimizerSettings, PolicyOptimizer

SETTINGS = OptimizerSettings(learning_rate=0.1, total_updates=10)
MUON = OptimizerSettings(learning_rate=0.1, total_updates=10, optimizer="muon")


def network(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, 2).to(dtype)


def blocks(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(6, 4), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8)])).to(dtype)


def set_gradients(module, seed=1, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(parameter.grad_dtype)


def test_first_update_is_adamw_by_hand():
    module = network()
    settings = OptimizerSettings(learning_rate=0.1, total_updates=1, weight_decay=0.5, max_grad_norm=1e9)
    weight, bias = module.weight.detach().clone(), module.bias.detach().clone()
    set_gradients(module)
    weight_sign, bias_sign = module.weight.grad.sign(), module.bias.grad.sign()
    PolicyOptimizer(module, settings).update()
    # at the first step m / sqrt(v) is the sign; decay applies to the matrix only
    torch.testing.assert_close(module.weight, weight * (1 - 0.05) - 0.1 * weight_sign, atol=1e-5, rtol=0)
    torch.testing.assert_close(module.bias, bias - 0.1 * bias_sign, atol=1e-5, rtol=0)
    assert module.weight.grad is None


def test_constant_schedule_with_warm_up():
    settings = OptimizerSettings(learning_rate=0.8, total_updates=10, warmup_updates=4)
    assert [settings.learning_rate_at(i) for i in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_cosine_schedule():
    settings = OptimizerSettings(
        learning_rate=1.0, total_updates=6, warmup_updates=2, schedule="cosine", min_lr_ratio=0.2
    )
    middle = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2
    assert [settings.learning_rate_at(i) for i in (0, 1, 2, 3, 4, 6, 99)] == pytest.approx(
        [0.5, 1.0, 1.0, middle, 0.6, 0.2, 0.2]
    )


def test_gradients_are_clipped_to_the_norm():
    big, small = network(), network()
    set_gradients(big, scale=100.0)
    set_gradients(small, scale=1.0)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in small.parameters()))
    for module, scale in ((big, 100.0), (small, 1.0)):
        optimizer = PolicyOptimizer(module, OptimizerSettings(learning_rate=0.1, total_updates=1, max_grad_norm=0.5))
        assert optimizer.update().grad_norm == pytest.approx(norm * scale, rel=1e-5)
    # AdamW forgets the scale, its second moment does not
    torch.testing.assert_close(big.weight, small.weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_gradients_change_nothing_and_are_named(value):
    module, twin = network(), network()
    optimizer, other = PolicyOptimizer(module, SETTINGS), PolicyOptimizer(twin, SETTINGS)
    set_gradients(module)
    module.bias.grad[1] = value
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    update = optimizer.update()
    assert update.non_finite == ("bias",)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    other.updates = 1
    for each in (module, twin):
        set_gradients(each, seed=2)
    assert optimizer.update().non_finite == ()
    other.update()
    assert torch.equal(module.weight, twin.weight), "the moments must not have seen the bad gradient"


def test_a_norm_that_overflows_counts_as_an_update_left_out():
    module = network()
    optimizer = PolicyOptimizer(module, SETTINGS)
    set_gradients(module)
    module.weight.grad[0] = 1e30
    before = module.weight.detach().clone()
    update = optimizer.update()
    assert (update.grad_norm, set(update.non_finite)) == (math.inf, {"weight", "bias"})
    assert torch.equal(module.weight, before)


def test_short_formats_are_updated_through_float32():
    module = network(torch.bfloat16)
    settings = OptimizerSettings(learning_rate=1e-5, total_updates=1000)
    start = module.weight.detach().float().clone()
    optimizer = PolicyOptimizer(module, settings)
    for _ in range(1000):
        set_gradients(module, scale=0.1)
        optimizer.update()
    # each step is far below the spacing of bfloat16 numbers near 0.5; together they move by about 0.01
    assert module.weight.dtype == torch.bfloat16
    moved = (module.weight.detach().float() - start).abs()
    assert moved.mean().item() == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_gradients_of_many_micro_batches_add_up(dtype):
    """In bfloat16, 256 + 1 is 256."""
    module = network(dtype)
    optimizer = PolicyOptimizer(module, OptimizerSettings(learning_rate=0.1, total_updates=1))
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    inputs = torch.ones(1, 3, dtype=dtype)
    for _ in range(5000):
        module(inputs).sum().backward()
    assert module.weight.grad.tolist() == [[5000.0] * 3] * 2
    assert optimizer.update().grad_norm == pytest.approx(5000 * math.sqrt(8))
    assert module.weight.dtype == dtype


def test_muon_moves_a_matrix_by_the_same_length_in_every_direction():
    module = blocks()
    embedding, matrices = module[0].weight, [layer.weight for layer in module[1]]
    before = [w.detach().clone() for w in (embedding, *matrices)]
    set_gradients(module, scale=1e-2)
    sign = embedding.grad.sign()
    PolicyOptimizer(module, MUON).update()
    torch.testing.assert_close(embedding, before[0] - 0.1 * sign, atol=1e-5, rtol=0)
    for weight, old in zip(matrices, before[1:], strict=True):
        lengths = torch.linalg.svdvals(weight.detach() - old) / (0.1 * 0.2 * math.sqrt(max(weight.shape)))
        # five iterations bring singular values near 1, not to it
        assert lengths.min() > 0.6
        assert lengths.max() < 1.3


def test_muon_needs_blocks():
    with pytest.raises(TrainingError, match="no matrices for Muon"):
        PolicyOptimizer(network(), MUON)


@pytest.mark.parametrize(("make", "settings"), [(network, SETTINGS), (blocks, MUON)], ids=["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_restores_exactly(dtype, make, settings):
    module, other = make(dtype), make(dtype)
    optimizer = PolicyOptimizer(module, settings)
    for seed in range(3):
        set_gradients(module, seed)
        optimizer.update()
    other.load_state_dict(module.state_dict())
    restored = PolicyOptimizer(other, settings)
    restored.load_state_dict(optimizer.state_dict())
    for seed in range(3, 6):
        for each, own in ((module, optimizer), (other, restored)):
            set_gradients(each, seed)
            own.update()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    assert restored.updates == 6


def test_state_of_another_optimizer_is_refused():
    state = PolicyOptimizer(blocks(), MUON).state_dict()
    with pytest.raises(UsageError, match=r"moments of adamw, muon, expected moments of adamw\..*trainer\.optimizer"):
        PolicyOptimizer(blocks(), SETTINGS).load_state_dict(state)


def test_nothing_to_train():
    with pytest.raises(TrainingError, match="no parameter to train"):
        PolicyOptimizer(network().requires_grad_(False), SETTINGS)
