"""Matrix products by oneDNN on CPUs on which it is faster than torch's default library.

In float32 it is faster on AMD processors. With AVX-512, it is about twice as fast as MKL, whose best code runs only on
Intel processors. With only AVX2, it is faster for few rows and weights that were packed in its layout once (1.3 to 2.7
times). In bfloat16, oneDNN is torch's default, and packed weights are even faster. The choice depends only on the
processor, so that runs are repeatable; results differ by rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from agentrl.config.number_format import CPU_INFO

SMALLEST = 1 << 16
"""Minimum number of entries of a matrix for which a faster product outweighs the overhead of Python."""
HEAD_DTYPE = "head_dtype"
FLOAT32_HEAD: dict[str, Any] = {HEAD_DTYPE: "float32", "enable_lm_head_fp32": True}
"""Entries of a model's config.json for float32 logits: the first for vLLM, the trainer and the local engine, the second
for SGLang."""
BLOCK = 8192
"""Number of rows of a weight that are converted to float32 at once."""


@functools.cache
def onednn_is_faster() -> bool:
    """Return True if oneDNN is faster on this processor in float32, with weights in torch's layout."""
    return packing_is_faster() and "avx512f" in _processor()


@functools.cache
def packing_is_faster() -> bool:
    """Return True if oneDNN is faster on this processor in float32, with packed weights."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return "AuthenticAMD" in _processor() and has_onednn


def _processor() -> str:
    try:
        return CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def product(left: Tensor, weight: Tensor) -> Tensor:
    """Compute ``left @ weight.T`` with oneDNN: contiguous float32 [n, in] and [out, in] on the CPU."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, weight, None, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        by_rows = by_weight = None
        if ctx.needs_input_grad[0]:
            by_rows = product(gradient.contiguous(), weight.t().contiguous())
        if ctx.needs_input_grad[1]:
            by_weight = product(gradient.t().contiguous(), rows.t().contiguous())
        return by_rows, by_weight


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear`, with oneDNN where it is faster."""
    if not _is_for_onednn(inputs, weight):
        return functional.linear(inputs, weight, bias)
    rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
    needs_gradient = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    found: Tensor = _Linear.apply(rows, weight) if needs_gradient else product(rows, weight)  # type: ignore[no-untyped-call]
    found = found.reshape(*inputs.shape[:-1], len(weight))
    return found if bias is None else found + bias


def _is_for_onednn(inputs: Tensor, weight: Tensor) -> bool:
    return (
        inputs.dtype is weight.dtype is torch.float32
        and weight.numel() >= SMALLEST
        and inputs.numel() > 0
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and type(weight) in (Tensor, nn.Parameter)
        and onednn_is_faster()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def has_float32_head(config: Any) -> bool:
    """Return True if a model's config requests float32 logits."""
    return getattr(config.get_text_config(), HEAD_DTYPE, None) == "float32" or (
        getattr(config, HEAD_DTYPE, None) == "float32"
    )


def float32_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``rows @ weight.T + bias`` in float32 from operands in any format, without gradients.

    On a GPU, the product of bfloat16 operands has a float32 result; on a CPU, the weight is converted block by block.

    Args:
        rows: Input: [n, in].
        weight: Weight: [out, in].
        bias: Bias, if any: [out].

    Returns:
        The product: float32 [n, out].
    """
    if rows.device.type == "cuda" and rows.dtype is weight.dtype and rows.dtype is not torch.float32:
        found = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    elif weight.dtype is torch.float32:
        found = linear(rows.float(), weight)
    else:
        exact = rows.float()
        found = exact.new_empty(len(rows), len(weight))
        for first in range(0, len(weight), BLOCK):
            block = slice(first, first + BLOCK)
            torch.mm(exact, weight[block].float().t(), out=found[:, block])
    return found if bias is None else found.add_(bias)


class PackedProduct:
    """Product with a weight [out, in], packed once in oneDNN's layout where that is faster; for inference."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = weight.numel() >= SMALLEST and _packing_is_faster(weight.dtype)
        self._linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
        self._with_other: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    def __call__(self, rows: Tensor) -> Tensor:
        """Compute the product: [n, out] from [n, in]."""
        if not self._packed:
            return functional.linear(rows, self._weight, self._bias)
        return self._linear(rows, self._weight, self._bias, "none", [], "")

    def silu(self, rows: Tensor) -> Tensor:
        """Compute the product and apply SiLU, x sigmoid(x): [n, out] from [n, in]."""
        if not self._packed:
            return functional.silu(self(rows), inplace=True)
        return self._linear(rows, self._weight, self._bias, "swish", [], "")

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        """Compute the product and add `other`: [n, out] from [n, in] and [n, out]."""
        if not self._packed:
            return self(rows).add_(other)
        return self._with_other(rows, other, self._weight, self._bias, "add")

    def times(self, rows: Tensor, other: Tensor) -> Tensor:
        """Compute the product and multiply it by `other`: [n, out] from [n, in] and [n, out]."""
        if not self._packed:
            return self(rows).mul_(other)
        return self._with_other(rows, other, self._weight, self._bias, "mul")


def _packing_is_faster(dtype: torch.dtype) -> bool:
    if dtype is torch.bfloat16:
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    return packing_is_faster()


class FastLinear(nn.Linear):
    """Linear layer that computes its product with `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer."""
        return linear(input, self.weight, self.bias)


def use_fast_products(model: nn.Module) -> None:
    """Make a model's large linear layers use `linear`, if that is faster on this machine."""
    if not onednn_is_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= SMALLEST:
            module.__class__ = FastLinear
