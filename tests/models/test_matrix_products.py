"""Matrix products by oneDNN give torch's own numbers, forward and backward."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from agentrl.models import matrix_products

ONEDNN_IS_FASTER = matrix_products.onednn_is_faster


@pytest.fixture(autouse=True)
def _any_processor(monkeypatch):
    monkeypatch.setattr(matrix_products, "onednn_is_faster", lambda: True)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_equal_torch(shape, bias):
    torch.manual_seed(0)
    own = nn.Linear(192, 400, bias=bias)
    model = nn.Sequential(copy.deepcopy(own))
    matrix_products.use_fast_products(model)
    assert isinstance(model[0], matrix_products.FastLinear)
    results = []
    for layer in (own.double(), model[0]):
        inputs = torch.linspace(-1, 1, 192 * torch.Size(shape).numel(), dtype=layer.weight.dtype).reshape(*shape, 192)
        inputs.requires_grad_()
        found = layer(inputs)
        found.square().sum().backward()
        results.append([found, inputs.grad, layer.weight.grad, *([layer.bias.grad] if bias else [])])
    for exact, found in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_only_required_gradients_are_computed():
    inputs, weight = torch.randn(4, 300), torch.randn(300, 300, requires_grad=True)
    matrix_products.linear(inputs, weight).sum().backward()
    assert inputs.grad is None
    torch.testing.assert_close(weight.grad, inputs.sum(0).expand(300, 300), rtol=1e-5, atol=1e-5)
    assert matrix_products.linear(inputs, weight.detach()).grad_fn is None


def test_other_formats_are_torchs_own():
    inputs, weight = torch.randn(4, 300), torch.randn(300, 300)
    for cast in (torch.bfloat16, torch.float64):
        ours, own = (
            matrix_products.linear(inputs.to(cast), weight.to(cast)),
            functional.linear(inputs.to(cast), weight.to(cast)),
        )
        assert torch.equal(ours, own)
    with torch.autocast("cpu", torch.bfloat16):
        assert matrix_products.linear(inputs, weight).dtype is torch.bfloat16
    assert matrix_products.linear(inputs[:0], weight).shape == (0, 300)


def test_small_layers_stay_as_they_are():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(512, 512))
    matrix_products.use_fast_products(model)
    assert [type(layer) for layer in model] == [nn.Linear, matrix_products.FastLinear]
    again = copy.deepcopy(model)
    assert torch.equal(again[1](torch.ones(1, 512)), model[1](torch.ones(1, 512)))


@pytest.mark.parametrize(
    ("vendor", "flags", "as_they_are", "laid_out"),
    [
        ("AuthenticAMD", "avx2 avx512f", True, True),
        ("AuthenticAMD", "avx2", False, True),
        ("GenuineIntel", "avx2 avx512f", False, False),
    ],
)
def test_the_processor_decides_who_multiplies(tmp_path, monkeypatch, vendor, flags, as_they_are, laid_out):
    (tmp_path / "cpuinfo").write_text(f"vendor_id : {vendor}\nflags : {flags}\n")
    monkeypatch.setattr(matrix_products, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(matrix_products, "packing_is_faster", matrix_products.packing_is_faster.__wrapped__)
    assert matrix_products.packing_is_faster() is laid_out
    assert ONEDNN_IS_FASTER.__wrapped__() is as_they_are
